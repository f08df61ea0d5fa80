"""CASES 28 and 32 on both stages: the first token is prefill's, the last one is the context's, and none is too many."""

from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from schemas.events import Finish
from schemas.subjects import Stage, stream_name
from services.bus.jetstream import call
from tests.pipeline.conftest import Pipelines
from tests.pipeline.local import LocalPipeline
from tests.pipeline.served import gateway_of
from tests.pipeline.tiny import CONTEXT_TOKENS, SLUG


async def num_handed_on(pipeline: LocalPipeline) -> int:
    """Hand-offs that the decode workers have ever been given."""
    last: int = (await call(pipeline.bus, f"STREAM.INFO.{stream_name(Stage.DECODE, SLUG)}"))["state"]["last_seq"]
    return last


async def test_one_token_needs_no_decode_job(tiny_pipelines: Pipelines) -> None:
    job: dict[str, Any] = {"prompt_token_ids": list(range(3, 40)), "seed": 1, "ignore_eos": True}
    async with tiny_pipelines() as pipeline:
        before = await num_handed_on(pipeline)
        for n in (1, 3):
            answer = await pipeline.ask(**job, max_tokens=1, n=n)
            ends = [event for event in answer.events if isinstance(event, Finish)]
            assert [(end.reason, end.tokens) for end in ends] == [("length", 1)] * n
            assert [len(answer.token_ids(choice)) for choice in range(n)] == [1] * n
        assert await num_handed_on(pipeline) == before
        assert len((await pipeline.ask(**job, max_tokens=2)).token_ids()) == 2
        assert await num_handed_on(pipeline) == before + 1


async def test_up_to_the_last_place_and_never_beyond(tiny_pipelines: Pipelines) -> None:
    """A prompt must leave room for one token; what is asked for beyond the context is not made."""
    async with (
        tiny_pipelines() as pipeline,
        gateway_of(pipeline) as url,
        AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client,
    ):

        async def complete(num_tokens: int, **fields: Any) -> Any:
            prompt = [3 + number % 200 for number in range(num_tokens)]
            fields = {"max_tokens": 10, "temperature": 0, "extra_body": {"ignore_eos": True}, **fields}
            return await client.completions.create(model=SLUG, prompt=prompt, **fields)

        for room in (2, 1):
            whole = await complete(CONTEXT_TOKENS - room)
            assert (whole.usage.completion_tokens, whole.choices[0].finish_reason) == (room, "length")
            chunks = [chunk async for chunk in await complete(CONTEXT_TOKENS - room, stream=True)]
            assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
            assert chunks[-1].choices[0].finish_reason == "length"
        for num_tokens in (CONTEXT_TOKENS, CONTEXT_TOKENS + 1):
            for stream in (False, True):
                with pytest.raises(BadRequestError) as refused:
                    await complete(num_tokens, stream=stream)
                assert refused.value.code == "context_length_exceeded"
                assert f"{num_tokens} tokens" in refused.value.message and f"{CONTEXT_TOKENS} tokens" in str(refused)
        assert (await complete(5)).usage.completion_tokens == 10
