"""Requests that are refused: the status, the shape, and nothing on the bus."""

import asyncio
import json
from typing import Any

import pytest

from schemas.events import Error
from services.bus.jetstream import call
from services.settings import Bus as BusSettings
from tests.gateway.conftest import BUS, MakePipeline, Pipeline
from tests.gateway.scripted_worker import Work
from tests.gateway.tiny_model import CONTEXT_TOKENS
from tests.text.random_schemas import json_format

JSON = {"Content-Type": "application/json"}


async def refused(response: Any) -> dict[str, Any]:
    """The error of a response in OpenAI's shape."""
    assert response.status >= 400
    assert response.content_type == "application/json"
    assert response.headers["X-Request-Id"]
    text = await response.text()
    assert "Traceback" not in text
    error: dict[str, Any] = json.loads(text)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def num_published(pipeline: Pipeline) -> int:
    """Messages that the model's queue has ever had."""
    info = await call(pipeline.bus, f"STREAM.INFO.KVRELAY_PREFILL_{pipeline.model}")
    last: int = info["state"]["last_seq"]
    return last


@pytest.mark.parametrize(
    ("data", "headers"),
    [
        (b"", JSON),
        (b"[]", JSON),
        (b"null", JSON),
        (b'"s"', JSON),
        (b'{"a":1, x}', JSON),
        (b'{"model":"m","model":"m"}', JSON),
        (b'{"model":"m","prompt":"x","messages":[{"role":"user","content":"x"}],"temperature":NaN}', JSON),
        (b'{"model":"m","prompt":"x","messages":[{"role":"user","content":"x"}],"top_p":Infinity}', JSON),
        (b'{"max_tokens":' + b"9" * 400 + b"}", JSON),
        (b'{"model":"m","prompt":"x","messages":[{"role":"user","content":"x"}],"stream":"yes"}', JSON),
        (b"[" * 1000 + b"]" * 1000, JSON),
        (b"\xff\xfe", JSON),
        (b"\x1f\x8b\x08\x00", JSON),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_bodies(pipeline: Pipeline, path: str, data: bytes, headers: dict[str, str]) -> None:
    async with pipeline.session.post(pipeline.url + path, data=data, headers=headers) as response:
        error = await refused(response)
    assert response.status == 400
    assert error["type"] == "invalid_request_error"
    assert await num_published(pipeline) == 0


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        ({}, "Content-Type"),
        ({"Content-Type": ""}, "Content-Type"),
        ({"Content-Type": "text/plain"}, "Content-Type"),
        ({"Content-Type": "application/json; charset=utf-16"}, "charset"),
        ({"Content-Type": "application/json; charset=nonsense"}, "charset"),
        ({**JSON, "Content-Encoding": "gzip"}, "compressed"),
        ({"Content-Type": "Application/JSON; charset=UTF-8"}, ""),
    ],
)
async def test_how_a_good_body_is_sent(pipeline: Pipeline, headers: dict[str, str], named: str) -> None:
    data, url = json.dumps(pipeline.chat("hi")).encode(), pipeline.url + "/v1/chat/completions"
    async with pipeline.session.post(url, data=data, headers=headers, skip_auto_headers=["Content-Type"]) as response:
        if not named:
            assert response.status == 200
            return
        error = await refused(response)
    assert (response.status, error["type"]) == (400, "invalid_request_error") and named in error["message"]
    assert await num_published(pipeline) == 0


async def test_a_body_in_chunks_is_read_whole(pipeline: Pipeline) -> None:
    async def parts() -> Any:
        for byte in json.dumps(pipeline.chat("hi")).encode():
            yield bytes([byte])

    async with pipeline.session.post(pipeline.url + "/v1/chat/completions", data=parts(), headers=JSON) as response:
        assert response.status == 200


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_is_too_large_is_413(pipeline: Pipeline, chunked: bool) -> None:
    body = json.dumps(pipeline.chat("x" * 300_000)).encode()

    async def parts() -> Any:
        yield body

    data = parts() if chunked else body
    async with pipeline.session.post(pipeline.url + "/v1/chat/completions", data=data, headers=JSON) as response:
        error = await refused(response)
    assert response.status == 413
    assert "200000" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"model": "gpt-4"}, 404, "model_not_found", "model"),
        ({"max_tokens": 0}, 400, "invalid_request", "max_tokens"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "invalid_request", "tools"),
        ({"messages": []}, 400, "invalid_request", "messages"),
        ({"messages": [{"role": "user", "content": None}]}, 400, "invalid_request", "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "invalid_request", "messages[0].role"),
        ({"messages": [{"role": "system<|im_end|>", "content": "x"}]}, 400, "invalid_request", "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            400,
            "invalid_request",
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": "x" * CONTEXT_TOKENS}]}, 400, "context_length_exceeded", "messages"),
        ({"messages": [{"role": "user", "content": "x" * 150_000}]}, 400, "context_length_exceeded", "messages"),
        ({"logit_bias": {"259": 1}}, 400, "invalid_request", "logit_bias"),
        ({"response_format": json_format({"not": {}})}, 400, "invalid_request", "response_format"),
        ({"response_format": {"type": "json_schema"}}, 400, "invalid_request", "response_format"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, 400, "invalid_request", "ignore_eos"),
        ({"metadata": {"a": "x" * 100_000}}, 413, "too_large", "metadata"),
    ],
)
async def test_chats(
    pipeline: Pipeline, stream: bool, fields: dict[str, Any], status: int, code: str, param: str
) -> None:
    async with pipeline.post(pipeline.chat("hi", stream=stream) | fields) as response:
        error = await refused(response)
    assert (response.status, error["code"], error["param"]) == (status, code, param)
    assert await num_published(pipeline) == 0


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], None, [-1], [259], [1.5], "x" * CONTEXT_TOKENS, ["x", ""]])
async def test_prompts(pipeline: Pipeline, prompt: Any) -> None:
    async with pipeline.post({"model": pipeline.model, "prompt": prompt}, "/v1/completions") as response:
        error = await refused(response)
    assert (response.status, error["param"]) == (400, "prompt")
    assert await num_published(pipeline) == 0


async def test_the_longest_prompt_that_fits(pipeline: Pipeline) -> None:
    body = {"model": pipeline.model, "prompt": "x" * (CONTEXT_TOKENS - 1)}
    async with pipeline.post(body, "/v1/completions") as response:
        assert response.status == 200


async def test_an_empty_message_is_a_message(pipeline: Pipeline) -> None:
    messages = [{"role": "assistant", "content": None}, {"role": "user", "content": ""}]
    async with pipeline.post(pipeline.chat() | {"messages": messages}) as response:
        assert response.status == 200


async def test_text_parts_are_joined_and_control_tokens_stay_text(pipeline: Pipeline) -> None:
    parts = [{"type": "text", "text": "a<|im_end|>"}, {"type": "text", "text": "b"}]
    async with pipeline.post(pipeline.chat(parts)) as response:
        assert response.status == 200
    ids = (await pipeline.worker.taken.get()).job.prompt_token_ids or []
    assert (ids.count(1), ids.count(2)) == (2, 1)
    assert bytes(id_ - 3 for id_ in ids if id_ > 2).decode() == "user\na<|im_end|>b\nassistant\n"


async def test_routes(pipeline: Pipeline) -> None:
    async with pipeline.session.get(pipeline.url + "/v1/chat/completions") as response:
        await refused(response)
        assert (response.status, response.headers["Allow"]) == (405, "POST")
    async with pipeline.session.post(pipeline.url + "/v1/embeddings", json={}) as response:
        error = await refused(response)
        assert (response.status, error["type"]) == (404, "invalid_request_error")
    async with pipeline.session.get(pipeline.url + "/v1/models/none") as response:
        assert (await refused(response))["code"] == "model_not_found"


@pytest.mark.parametrize("expected", ["100-continue", "100-Continue", "200-ok"])
async def test_what_a_client_expects_is_done_or_let_be(pipeline: Pipeline, expected: str) -> None:
    """Curl expects to be told to go on before it sends a long body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(pipeline.url.rpartition(":")[2]))
    body = json.dumps(pipeline.chat()).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nExpect: {expected}\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode())
    if expected.lower() == "100-continue":
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert (await reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")
    writer.close()


async def test_unknown_fields(make_pipeline: MakePipeline) -> None:
    lenient, strict = await make_pipeline(), await make_pipeline(strict=True)
    async with lenient.post(lenient.chat(foo=1)) as response:
        assert response.status == 200
    async with strict.post(strict.chat(foo=1)) as response:
        assert (await refused(response))["param"] == "foo"


async def test_no_worker(make_pipeline: MakePipeline) -> None:
    pipeline = await make_pipeline(take=None)
    for stream in (False, True):
        async with pipeline.post(pipeline.chat(stream=stream)) as response:
            error = await refused(response)
        assert (response.status, error["code"], error["type"]) == (503, "no_worker", "server_error")
        assert int(response.headers["Retry-After"]) > 0


async def test_a_worker_that_warms_up_takes_nothing(pipeline: Pipeline) -> None:
    pipeline.worker.state = "warming"
    await pipeline.worker.beat()
    await until_ready_is(pipeline, "warming")
    async with pipeline.post(pipeline.chat()) as response:
        assert (await refused(response))["code"] == "no_worker"


async def test_a_request_may_wait_for_a_worker(make_pipeline: MakePipeline) -> None:
    pipeline = await make_pipeline(no_worker_timeout_s=20.0)
    pipeline.worker.state = "warming"
    await pipeline.worker.beat()
    await until_ready_is(pipeline, "warming")
    pipeline.worker.state = "ok"  # with its next beat
    async with pipeline.post(pipeline.chat()) as response:
        assert response.status == 200


async def until_ready_is(pipeline: Pipeline, state: str) -> dict[str, Any]:
    while True:
        async with pipeline.session.get(pipeline.url + "/ready") as response:
            report: dict[str, Any] = await response.json()
        if report["state"] == state:
            assert response.status == (200 if state in ("ok", "degraded") else 503)
            return report


async def test_ready(pipeline: Pipeline) -> None:
    assert (await until_ready_is(pipeline, "ok"))["reasons"] == []
    pipeline.worker.state = "degraded"
    await pipeline.worker.beat()
    assert (await until_ready_is(pipeline, "degraded"))["reasons"]
    pipeline.worker.state = "draining"
    await pipeline.worker.beat()
    report = await until_ready_is(pipeline, "warming")
    assert f"no prefill worker of {pipeline.model}" in report["reasons"]
    async with pipeline.session.get(pipeline.url + "/health") as response:
        assert response.status == 200
        assert (await response.json())["status"] == "ok"


async def test_a_full_queue(make_pipeline: MakePipeline) -> None:
    bus = BusSettings(**{n: getattr(BUS, n) for n in BUS.__struct_fields__} | {"queue_max_messages": 1})
    pipeline = await make_pipeline(take=False, bus=bus, keepalive_s=0.05)
    async with pipeline.post(pipeline.chat(stream=True)) as waiting:
        assert waiting.status == 200  # with its first comment; its job fills the queue
        async with pipeline.post(pipeline.chat()) as response:
            error = await refused(response)
    assert (response.status, error["code"], error["type"]) == (429, "queue_full", "rate_limit_error")
    assert int(response.headers["Retry-After"]) > 0


async def test_a_job_error_before_the_first_event_has_its_status(pipeline: Pipeline) -> None:
    async def script(work: Work) -> None:
        await work.say(Error(code="poisoned", message="it brought its worker down"))

    pipeline.worker.script = script
    for stream in (False, True):
        async with pipeline.post(pipeline.chat(stream=stream)) as response:
            error = await refused(response)
        assert (response.status, error["code"]) == (500, "poisoned")
