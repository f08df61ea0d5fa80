"""CASES 38: how streams end, to the last byte of the connection: whole ones, and those that fail."""

import asyncio
import json
from typing import Any

import pytest

from schemas.events import Done, Error, Event, Finish, Usage
from tests.gateway.conftest import Pipeline
from tests.gateway.scripted_worker import Work, token
from tests.gateway.sse import parse

PATHS = ["/v1/chat/completions", "/v1/completions"]


async def to_the_end(pipeline: Pipeline, path: str, body: dict[str, Any]) -> str:
    """All that comes until the connection is closed. HTTP/1.0: nothing but that tells where the body ends."""
    host, port = pipeline.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head.encode() + data)
    async with asyncio.timeout(20):
        found = await reader.read()
    writer.close()
    await writer.wait_closed()
    head, _, text = found.decode().partition("\r\n\r\n")
    assert " 200 " in head.splitlines()[0] and "text/event-stream" in head
    return text


def asked(pipeline: Pipeline, path: str, **fields: Any) -> dict[str, Any]:
    prompt: Any = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    return {"model": pipeline.model, "stream": True, **prompt, **fields}


@pytest.mark.parametrize("path", PATHS)
async def test_whole_streams(pipeline: Pipeline, path: str) -> None:
    reason: Any = "stop"

    async def script(work: Work) -> None:
        await work.say(work.start())
        choices = range(work.job.n)
        await work.say(*(token(0, "a", choice) for choice in choices))
        finishes: list[Event] = [Finish(choice=c, reason=reason, text="b", tokens=1) for c in choices]
        await work.say(*finishes, Done(usage=Usage(prompt_tokens=2, completion_tokens=work.job.n)))

    pipeline.worker.script = script
    for reason in ("stop", "length"):
        for n in (1, 2):
            for options in ({}, {"stream_options": {"include_usage": True}}):
                text = await to_the_end(pipeline, path, asked(pipeline, path, n=n, **options))
                *events, done = [event.data for event in parse(text)]
                assert done == "[DONE]" and text.endswith("data: [DONE]\n\n")
                chunks = [json.loads(event) for event in events]
                assert len({(chunk["id"], chunk["model"], chunk["created"]) for chunk in chunks}) == 1
                if options:
                    last = chunks.pop()
                    assert last["choices"] == [] and last["usage"]["completion_tokens"] == n
                ends = [c for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
                assert sorted((end["index"], end["finish_reason"]) for end in ends) == [(i, reason) for i in range(n)]
                if "chat" in path:
                    firsts = [c["delta"] for chunk in chunks[:n] for c in chunk["choices"]]
                    assert [delta.get("role") for delta in firsts] == ["assistant"] * n


@pytest.mark.parametrize("path", PATHS)
async def test_failed_streams(pipeline: Pipeline, path: str) -> None:
    async def script(work: Work) -> None:
        await work.say(work.start(), *(token(index, "a") for index in range(5)))
        await work.say(Error(code="internal", message="the worker failed"))

    pipeline.worker.script = script
    text = await to_the_end(pipeline, path, asked(pipeline, path, stream_options={"include_usage": True}))
    *events, last = [json.loads(event.data) for event in parse(text)]
    assert "[DONE]" not in text and last["error"]["code"] == "internal"
    assert not [c for event in events for c in event["choices"] if c["finish_reason"]]
    assert all(event["usage"] is None for event in events)
