"""What clients ask for beside the common fields: echoed prompts, stop reasons, routes that are not there."""

import json
from typing import Any

import pytest

from schemas.events import Done, Finish, Usage
from tests.gateway.conftest import Pipeline
from tests.gateway.scripted_worker import Work, saying, token
from tests.gateway.sse import events
from tests.gateway.tiny_model import token_id


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "texts"),
    [("ab", ["ab"]), (["ab", "c"], ["ab", "c"]), ([token_id(ord(c)) for c in "hé"[:1]] + [1], ["h<|im_start|>"])],
)
async def test_echo(pipeline: Pipeline, prompt: Any, texts: list[str], stream: bool) -> None:
    pipeline.worker.script = saying("!", "?")
    body = {"model": pipeline.model, "prompt": prompt, "echo": True, "n": 2, "stream": stream}
    async with pipeline.post(body, "/v1/completions") as response:
        assert response.status == 200, await response.text()
        if stream:
            said = [""] * (2 * len(texts))
            async for event in events(response):
                for choice in json.loads(event.data)["choices"] if event.data != "[DONE]" else []:
                    said[choice["index"]] += choice["text"]
        else:
            said = [choice["text"] for choice in (await response.json())["choices"]]
    assert said == [f"{text}!?" for text in texts for _ in range(2)]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stop", ["END", None])
async def test_stop_reason(pipeline: Pipeline, path: str, stop: str | None) -> None:
    async def script(work: Work) -> None:
        end = Finish(choice=0, reason="stop", stop=stop, tokens=1)
        usage = Usage(prompt_tokens=1, completion_tokens=1)
        await work.say(work.start(), token(0, "x"), end, Done(usage=usage))

    pipeline.worker.script = script
    body = pipeline.chat() if "chat" in path else {"model": pipeline.model, "prompt": "a"}
    async with pipeline.post(body, path) as response:
        assert (await response.json())["choices"][0]["stop_reason"] == stop
    async with pipeline.post({**body, "stream": True}, path) as response:
        chunks = [json.loads(event.data) async for event in events(response) if event.data != "[DONE]"]
    assert [chunk["choices"][0]["stop_reason"] for chunk in chunks][-1] == stop


async def test_fields_of_vllm_reach_the_job(pipeline: Pipeline) -> None:
    fields = {"top_k": 5, "min_p": 0.1, "ignore_eos": True, "cache_salt": "s", "repetition_penalty": 1.2}
    fields |= {"presence_penalty": 0.5, "frequency_penalty": -0.5, "seed": 3, "logit_bias": {"5": -1.0}}
    async with pipeline.post(pipeline.chat(**fields)) as response:
        assert response.status == 200, await response.text()
    job = (await pipeline.worker.taken.get()).job
    assert {name: getattr(job, name) for name in fields} == {**fields, "logit_bias": {5: -1.0}}


@pytest.mark.parametrize("path", ["responses", "embeddings", "audio/speech", "images/generations", "moderations"])
async def test_routes_that_are_not_there(pipeline: Pipeline, path: str) -> None:
    async with pipeline.post({"model": pipeline.model, "input": "x"}, f"/v1/{path}") as response:
        assert response.status == 404
        error = (await response.json())["error"]
    assert error["code"] == "not_found" and f"/v1/{path}" in error["message"]


@pytest.mark.parametrize("key", ["", "a b", "é", "x" * 256])
async def test_idempotency_keys(pipeline: Pipeline, key: str) -> None:
    url, headers = f"{pipeline.url}/v1/chat/completions", {"Idempotency-Key": key}
    async with pipeline.session.post(url, json=pipeline.chat(), headers=headers) as response:
        assert response.status == (400 if key else 200)
        if key:
            assert (await response.json())["error"]["param"] == "Idempotency-Key"
