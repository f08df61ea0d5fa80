"""The official client works against the gateway, and sees its errors as its own."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from schemas.events import Error
from tests.gateway.conftest import MakePipeline, Pipeline
from tests.gateway.scripted_worker import Work, saying, token


@contextlib.asynccontextmanager
async def client_of(pipeline: Pipeline) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=pipeline.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def client(pipeline: Pipeline) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(pipeline) as found:
        yield found


async def test_chat(pipeline: Pipeline, client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=pipeline.model, messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=1, seed=1
    )
    assert answer.choices[0].message.content == "Hello 世界 👋"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert answer.choices[0].logprobs.content[0].token == "H"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


async def test_streamed_chat(make_pipeline: MakePipeline) -> None:
    pipeline = await make_pipeline(keepalive_s=0.01)  # comments must not show
    text, reasons, usage = "", [], None
    async with client_of(pipeline) as client:
        stream = await client.chat.completions.create(
            model=pipeline.model,
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reasons += [choice.finish_reason] if choice.finish_reason else []
    assert text == "Hello 世界 👋"
    assert reasons == ["stop"]
    assert usage is not None
    assert usage.completion_tokens == 3


async def test_completions(pipeline: Pipeline, client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model=pipeline.model, prompt=["a", "b"], logprobs=2, n=2)
    assert [choice.text for choice in answer.choices] == ["Hello 世界 👋"] * 4
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.text_offset == [0, 5, 8]
    stream = await client.completions.create(model=pipeline.model, prompt=[70, 71], stream=True)
    text = "".join([choice.text async for chunk in stream for choice in chunk.choices])
    assert text == "Hello 世界 👋"


async def test_models(pipeline: Pipeline, client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [pipeline.model]
    assert (await client.models.retrieve(pipeline.model)).id == pipeline.model


async def test_errors(pipeline: Pipeline, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="none", messages=[{"role": "user", "content": "hi"}])
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(
            model=pipeline.model, messages=[{"role": "user", "content": "hi"}], max_tokens=0, stream=True
        )
    assert bad.value.param == "max_tokens"


async def test_an_error_in_a_stream_is_raised(pipeline: Pipeline, client: openai.AsyncOpenAI) -> None:
    async def script(work: Work) -> None:
        await work.say(work.start(), token(0, "x"))
        await work.say(Error(code="kv_unavailable", message="the blocks are gone"))

    pipeline.worker.script = script
    stream = await client.chat.completions.create(
        model=pipeline.model, messages=[{"role": "user", "content": "hi"}], stream=True
    )
    with pytest.raises(openai.APIError, match="the blocks are gone"):
        async for _ in stream:
            pass


async def test_a_schema_goes_with_the_job(make_pipeline: MakePipeline) -> None:
    """As the client's own `parse` writes it for a model of pydantic's."""
    seen: list[Any] = []

    async def answer(work: Work) -> None:
        seen.append(work.job.response_format)
        await saying('{"name": "Ann", ', '"age": 3}')(work)

    pipeline = await make_pipeline()
    pipeline.worker.script = answer
    async with client_of(pipeline) as client:
        found = await client.chat.completions.parse(
            model=pipeline.model, messages=[{"role": "user", "content": "who?"}], response_format=Person
        )
    assert found.choices[0].message.parsed == Person(name="Ann", age=3)
    (wanted,) = seen
    assert wanted.json_schema.name == "Person"
    assert list(wanted.json_schema.schema["properties"]) == ["name", "age"]


class Person(BaseModel):
    name: str
    age: int
