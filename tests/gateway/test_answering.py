"""Requests that go well, as they look on HTTP."""

import asyncio
import json
from typing import Any

import pytest

from tests.gateway.conftest import MakePipeline, Pipeline
from tests.gateway.scripted_worker import saying, token
from tests.gateway.sse import parse

USAGE = {"total_tokens", "prompt_tokens", "completion_tokens", "prompt_tokens_details"}


async def events_of(response: Any) -> list[str]:
    """The data of each event, in order; fails on anything that is no event, comment or blank line."""
    assert response.status == 200
    assert response.headers["Content-Type"].startswith("text/event-stream")
    text = await response.text()
    assert text.endswith("\n\n")
    return [event.data for event in parse(text)]


async def test_a_whole_chat(pipeline: Pipeline) -> None:
    async with pipeline.post(pipeline.chat("hi")) as response:
        body = await response.json()
        assert response.status == 200
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello 世界 👋", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert body["object"] == "chat.completion"
    assert body["model"] == pipeline.model
    assert body["id"].startswith("chatcmpl-")
    assert set(body["usage"]) == USAGE
    assert body["usage"]["completion_tokens"] == 3
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("n", [1, 2])
async def test_a_streamed_chat(pipeline: Pipeline, include_usage: bool, n: int) -> None:
    body = pipeline.chat("hi", n=n)
    async with pipeline.post(body) as response:
        whole = await response.json()
    body |= {"stream": True, "stream_options": {"include_usage": include_usage}}
    async with pipeline.post(body) as response:
        assert response.headers["Cache-Control"] == "no-cache"
        assert response.headers["X-Accel-Buffering"] == "no"
        events = await events_of(response)
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert len({(c["id"], c["model"], c["created"]) for c in chunks}) == 1
    if include_usage:
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"] == whole["usage"]
        assert all(c["usage"] is None for c in chunks)
    else:
        assert all("usage" not in c for c in chunks)
    for index in range(n):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert sum("role" in c["delta"] for c in mine) == 1
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["stop"]
        assert mine[-1]["finish_reason"] == "stop"
        joined = "".join(c["delta"].get("content", "") for c in mine)
        assert joined == whole["choices"][index]["message"]["content"] == "Hello 世界 👋"


async def test_held_back_text_comes_with_the_finish(pipeline: Pipeline) -> None:
    pipeline.worker.script = saying("a", "", held_back="bc")
    async with pipeline.post(pipeline.chat(stream=True)) as response:
        events = await events_of(response)
    contents = [json.loads(e)["choices"][0]["delta"].get("content") for e in events[:-1]]
    assert contents == ["", "a", "bc", None]


async def test_the_events_of_a_step_are_one_write(pipeline: Pipeline) -> None:
    async def script(work: Any) -> None:
        await work.say(work.start())
        await work.say(*(token(i, "x") for i in range(50)))
        await work.lost.wait()

    pipeline.worker.script = script
    async with pipeline.post(pipeline.chat(stream=True)) as response:
        first = await response.content.readany()
        while b'"x"' not in first:
            first = await response.content.readany()
        assert first.count(b'"content":"x"') == 50


async def test_chat_logprobs(pipeline: Pipeline) -> None:
    body = pipeline.chat(logprobs=True, top_logprobs=2)
    async with pipeline.post(body) as response:
        whole = (await response.json())["choices"][0]["logprobs"]["content"]
    async with pipeline.post({**body, "stream": True}) as response:
        chunks = [json.loads(event)["choices"][0] for event in (await events_of(response))[:-1]]
    assert [e for c in chunks if c["logprobs"] for e in c["logprobs"]["content"]] == whole
    assert len(whole) == 3
    assert whole[0]["token"] == "H"
    assert [top["token"] for top in whole[0]["top_logprobs"]] == ["H", "I"]


async def test_several_prompts(pipeline: Pipeline) -> None:
    async def script(work: Any) -> None:
        await saying(bytes(id_ - 3 for id_ in work.job.prompt_token_ids).decode() * 2)(work)

    pipeline.worker.script = script
    body = {"model": pipeline.model, "prompt": ["a", "bb", "ccc"], "n": 2}
    async with pipeline.post(body, "/v1/completions") as response:
        whole = await response.json()
    texts = [choice["text"] for choice in whole["choices"]]
    assert texts == ["aa", "aa", "bbbb", "bbbb", "cccccc", "cccccc"]
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    assert whole["usage"]["prompt_tokens"] == 6
    async with pipeline.post({**body, "stream": True}, "/v1/completions") as response:
        events = await events_of(response)
    joined = [""] * 6
    for event in events[:-1]:
        (choice,) = json.loads(event)["choices"]
        joined[choice["index"]] += choice["text"]
    assert joined == texts


async def test_what_a_job_carries(pipeline: Pipeline) -> None:
    body = pipeline.chat(
        "é👋",
        temperature=0.5,
        top_k=3,
        seed=9,
        stop="x",
        max_completion_tokens=5,
        logit_bias={"5": -1},
        cache_salt="s",
        metadata={"a": "b"},
    )
    trace = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    async with pipeline.session.post(
        pipeline.url + "/v1/chat/completions", json=body, headers={"traceparent": trace, "X-Request-Id": "mine"}
    ) as response:
        assert response.headers["X-Request-Id"] == "mine"
        answer = (await response.json())["id"].removeprefix("chatcmpl-")
    work = await pipeline.worker.taken.get()
    job = work.job
    assert job.id == f"req-{answer}"
    assert work.delivery.headers["Nats-Msg-Id"] == f"default.{job.id}"
    assert "a" * 32 in work.delivery.headers["traceparent"]
    assert job.messages is None and job.prompt is None
    text = bytes(id_ - 3 for id_ in job.prompt_token_ids or [] if id_ > 2).decode()
    assert text == "user\né👋\nassistant\n"
    assert (job.temperature, job.top_k, job.seed, job.stop, job.max_tokens) == (0.5, 3, 9, ["x"], 5)
    assert (job.logit_bias, job.cache_salt, job.metadata) == ({5: -1.0}, "s", {"a": "b"})
    assert (job.owner, job.on_disconnect) == (f"gateway-{pipeline.model}", "cancel")


async def test_a_strange_request_id_is_not_echoed(pipeline: Pipeline) -> None:
    async with pipeline.session.get(pipeline.url + "/health", headers={"X-Request-Id": "a b" * 100}) as response:
        assert len(response.headers["X-Request-Id"]) == 24


async def test_models(pipeline: Pipeline) -> None:
    async with pipeline.session.get(pipeline.url + "/v1/models") as response:
        (model,) = (await response.json())["data"]
    assert model["id"] == pipeline.model
    assert model["context_length"] == 128
    assert model["builds"] == ["0123456789ab"]
    async with pipeline.session.get(f"{pipeline.url}/v1/models/Org/{pipeline.model}") as response:
        assert (await response.json())["id"] == pipeline.model


async def test_a_model_without_workers_is_not_listed(make_pipeline: MakePipeline) -> None:
    pipeline = await make_pipeline(take=None)
    async with pipeline.session.get(pipeline.url + "/v1/models") as response:
        assert (await response.json()) == {"data": [], "object": "list"}


async def test_comments_fill_the_silence_from_acceptance_on(make_pipeline: MakePipeline) -> None:
    pipeline = await make_pipeline(keepalive_s=0.05)
    seen: list[str] = []

    async def script(work: Any) -> None:
        await released.wait()
        await saying("late")(work)

    released = asyncio.Event()
    pipeline.worker.script = script
    async with pipeline.post(pipeline.chat(stream=True)) as response:
        while len(seen) < 3:
            line = (await response.content.readline()).decode().strip()
            seen += [line] if line else []
        released.set()
        rest = (await response.content.read()).decode()
    assert seen == [": keep-alive"] * 3
    assert '"content":"late"' in rest
    assert rest.endswith("data: [DONE]\n\n")
