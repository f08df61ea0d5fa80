"""A small OpenAI client for one streamed chat answer: what `curl` would do, in Python's own library."""

import http.client
import json
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import msgspec

from schemas.errors import Internal, error_from_code

_TIMEOUT_S = 120.0


class StreamedAnswer(msgspec.Struct, kw_only=True):
    """Filled while `stream` is read. `ttft_s` counts from the request to the first text."""

    text: str = ""
    reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    ttft_s: float = 0.0
    took_s: float = 0.0

    def summary(self) -> str:
        rate = (self.completion_tokens - 1) / (self.took_s - self.ttft_s) if self.took_s > self.ttft_s else 0.0
        return (
            f"{self.prompt_tokens} prompt tokens ({self.cached_tokens} cached), {self.completion_tokens} tokens "
            f"({self.reason}), first after {self.ttft_s:.3f} s, then {rate:.1f} tokens/s"
        )


def stream_chat(base_url: str, body: dict[str, Any], answer: StreamedAnswer) -> Iterator[str]:
    """Yields the pieces of text and fills `answer`. Raises the error that the server answers."""
    asked_s = time.monotonic()
    for chunk in _chunks(base_url, {**body, "stream": True, "stream_options": {"include_usage": True}}):
        for choice in chunk["choices"]:
            text = choice["delta"].get("content") or ""
            answer.reason = choice["finish_reason"] or answer.reason
            if text:
                answer.took_s = time.monotonic() - asked_s
                answer.ttft_s = answer.ttft_s or answer.took_s
                answer.text += text
                yield text
        if usage := chunk.get("usage"):
            answer.prompt_tokens, answer.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def _chunks(base_url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The data events, up to [DONE]. Raises `Internal` if the stream ends without it."""
    connection = http.client.HTTPConnection(urlsplit(base_url).netloc, timeout=_TIMEOUT_S)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body).encode(), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise _error(json.loads(response.read()))
        for line in response:
            name, _, data = line.decode("utf-8").strip().partition(": ")
            if name != "data":
                continue
            if data == "[DONE]":
                return
            chunk: dict[str, Any] = json.loads(data)
            if "error" in chunk:
                raise _error(chunk)
            yield chunk
        raise Internal("the stream ended without [DONE]")
    finally:
        connection.close()


def _error(body: dict[str, Any]) -> Exception:
    error = body["error"]
    return error_from_code(error["code"] or "", error["message"], error.get("param"))
