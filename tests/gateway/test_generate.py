"""`/generate` as clients of text-generation-inference use it."""

import json
from typing import Any

import pytest
from huggingface_hub import AsyncInferenceClient

from schemas.errors import Forbidden
from schemas.events import Error
from tests.gateway.conftest import MakePipeline, Pipeline
from tests.gateway.scripted_worker import Work, saying, token
from tests.gateway.sse import parse

SAID = "Hello 世界 👋"


async def generated(pipeline: Pipeline, path: str = "/generate", **parameters: Any) -> Any:
    return await pipeline.session.post(pipeline.url + path, json={"inputs": "hi", "parameters": parameters})


async def test_a_whole_answer(pipeline: Pipeline) -> None:
    assert await (await generated(pipeline)).json() == {"generated_text": SAID}
    job = (await pipeline.worker.taken.get()).job
    assert (job.temperature, job.max_tokens, job.logprobs) == (0.0, 100, None)
    body = await (await generated(pipeline, details=True, return_full_text=True, top_k=3, seed=5)).json()
    assert body["generated_text"] == "hi" + SAID
    assert body["details"]["finish_reason"] == "eos_token"
    assert [one["text"] for one in body["details"]["tokens"]] == ["Hello", " 世界", " 👋"]
    job = (await pipeline.worker.taken.get()).job
    assert (job.temperature, job.top_k, job.seed) == (1.0, 3, 5)


async def test_a_stream(pipeline: Pipeline) -> None:
    pipeline.worker.script = saying("a", "b", held_back="c")
    response = await generated(pipeline, "/generate_stream", top_n_tokens=2, max_new_tokens=7)
    text = await response.text()
    assert "[DONE]" not in text
    events = [json.loads(event.data) for event in parse(text)]
    assert [event["token"]["text"] for event in events] == ["a", "b", "c", ""]
    assert [event["index"] for event in events] == [1, 2, 2, 2]
    assert [len(event["top_tokens"]) for event in events] == [2, 2, 0, 0]
    assert [event["generated_text"] for event in events] == [None, None, None, "abc"]
    assert events[-1]["token"]["special"]
    assert events[-1]["details"]["generated_tokens"] == 2


@pytest.mark.parametrize("details", [False, True])
async def test_the_hub_s_own_client(pipeline: Pipeline, details: bool) -> None:
    async with AsyncInferenceClient(model=pipeline.url + "/generate_stream") as client:
        stream = await client.text_generation("hi", stream=True, details=details)
        found = [event async for event in stream]
    texts = [event.token.text if details else event for event in found]
    assert "".join(texts) == SAID
    async with AsyncInferenceClient(model=pipeline.url + "/generate") as client:
        whole = await client.text_generation("hi", details=details)
    assert (whole.generated_text if details else whole) == SAID


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "inputs"),
        ({"inputs": ""}, "inputs"),
        ({"inputs": 3}, "str"),
        ({"inputs": "a", "parameters": {"watermark": True}}, "watermark"),
        ({"inputs": "a", "parameters": {"temperature": 0.0}}, "temperature"),
        ({"inputs": "a" * 200}, "context"),
        ({"inputs": "\ud800"}, "surrogate"),
        ({"inputs": "a", "parameters": {"stop": ["\ud800"]}}, "surrogate"),
    ],
)
async def test_refusals_have_their_shape(pipeline: Pipeline, body: dict[str, Any], words: str) -> None:
    async with pipeline.session.post(pipeline.url + "/generate", json=body) as response:
        told = await response.json()
        assert (response.status, told["error_type"]) == (422, "validation")
        assert words in told["error"]


async def test_what_is_worth_another_try_says_when(make_pipeline: MakePipeline) -> None:
    pipeline = await make_pipeline(take=None)
    response = await generated(pipeline)
    assert (response.status, (await response.json())["error_type"]) == (503, "generation")
    assert response.headers["Retry-After"]


async def test_later_errors_too(make_pipeline: MakePipeline) -> None:
    async def script(work: Work) -> None:
        await work.say(work.start(), token(0, "x", logprobs=0))
        await work.say(Error.of(Forbidden("not this one")))

    pipeline = await make_pipeline()
    pipeline.worker.script = script
    response = await generated(pipeline)
    assert (response.status, await response.json()) == (403, {"error": "not this one", "error_type": "generation"})
    events = parse(await (await generated(pipeline, "/generate_stream")).text())
    assert [json.loads(event.data)["error"]["message"] for event in events[1:]] == ["not this one"]
