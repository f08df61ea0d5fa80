"""Clients that people have already: each streams an answer, the one that the same job gets over NATS."""

import json
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple

import jsonschema
import pytest
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI

from schemas.events import Done, Token
from tests.pipeline.conftest import Pipelines
from tests.pipeline.served import MODEL, gateway_of

MESSAGES = [{"role": "user", "content": "Name three colours."}]
MAX_TOKENS, SEED = 24, 7


class Heard(NamedTuple):
    text: str
    reason: str
    prompt_tokens: int
    completion_tokens: int


async def openai(url: str) -> Heard:
    text, reason, usage = "", "", None
    async with AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as client:
        async for chunk in await client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_tokens=MAX_TOKENS,
            seed=SEED,
            stream=True,
            stream_options={"include_usage": True},
        ):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reason = choice.finish_reason or reason
    assert usage is not None
    return Heard(text, reason, usage.prompt_tokens, usage.completion_tokens)


async def langchain(url: str) -> Heard:
    client = ChatOpenAI(
        model=MODEL,
        base_url=url,
        api_key="unused",
        max_tokens=MAX_TOKENS,
        seed=SEED,
        stream_usage=True,
        max_retries=0,
    )
    whole: Any = None
    async for chunk in client.astream([("human", MESSAGES[0]["content"])]):
        whole = chunk if whole is None else whole + chunk
    usage = whole.usage_metadata
    return Heard(whole.content, whole.response_metadata["finish_reason"], usage["input_tokens"], usage["output_tokens"])


async def litellm(url: str, monkeypatch: pytest.MonkeyPatch) -> Heard:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the internet for prices
    import litellm as client

    text, reason, usage = "", "", None
    async for chunk in await client.acompletion(
        model=f"openai/{MODEL}",
        api_base=url,
        api_key="unused",
        messages=MESSAGES,
        max_tokens=MAX_TOKENS,
        seed=SEED,
        stream=True,
        stream_options={"include_usage": True},
        num_retries=0,
    ):
        usage = getattr(chunk, "usage", None) or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    assert usage is not None
    return Heard(text, reason, usage.prompt_tokens, usage.completion_tokens)


async def test_all_hear_what_nats_says(pipelines: Pipelines, monkeypatch: pytest.MonkeyPatch):
    clients: list[Callable[[str], Awaitable[Heard]]] = [openai, langchain, lambda url: litellm(url, monkeypatch)]
    async with pipelines("int8") as pipeline, gateway_of(pipeline) as url:
        answer = await pipeline.ask(messages=MESSAGES, max_tokens=MAX_TOKENS, seed=SEED)
        assert isinstance(answer.end, Done)
        usage = answer.end.usage
        told = Heard(answer.text(), answer.finish().reason, usage.prompt_tokens, usage.completion_tokens)
        assert told.text and told.completion_tokens == len(answer.token_ids())
        for client in clients:
            assert await client(url) == told


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


async def test_openai_hears_all_of_an_answer_that_is_held_to_a_schema(pipelines: Pipelines):
    """The logprobs of prefill's token too; whole and streamed."""
    held: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    asked: Any = {"messages": [{"role": "user", "content": "Invent somebody. Answer as JSON."}], "seed": SEED}
    async with (
        pipelines("int8") as pipeline,
        gateway_of(pipeline) as url,
        AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as client,
    ):
        answer = await pipeline.ask(**asked, response_format=held, logprobs=2, max_tokens=80)
        assert isinstance(answer.end, Done)
        told = [
            (event.logprobs.logprob, len(event.logprobs.top))
            for event in answer.essence
            if isinstance(event, Token) and event.logprobs
        ]
        ask = partial(
            client.chat.completions.create,
            model=MODEL, **asked, response_format=held, logprobs=True, top_logprobs=2, max_completion_tokens=80,
        )  # fmt: skip
        whole = await ask()
        choice = whole.choices[0]
        assert choice.logprobs is not None and choice.logprobs.content and whole.usage
        heard = [(token.logprob, len(token.top_logprobs)) for token in choice.logprobs.content]
        assert heard == told and len(told) == len(answer.token_ids())
        assert (choice.message.content, choice.finish_reason) == (answer.text(), answer.finish().reason)
        assert whole.usage.completion_tokens == answer.end.usage.completion_tokens
        jsonschema.validate(json.loads(choice.message.content or ""), PERSON)
        text, streamed = "", []
        async for chunk in await ask(stream=True):
            text += chunk.choices[0].delta.content or ""
            if chunk.choices[0].logprobs:
                streamed += [(token.logprob, len(token.top_logprobs)) for token in chunk.choices[0].logprobs.content]
        assert (text, streamed) == (answer.text(), told)
