"""Clients that people have already: each streams an answer, the one that the same job gets over NATS."""

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import pytest
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI

from schemas.events import Done
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
