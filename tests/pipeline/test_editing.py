"""A conversation that is edited keeps every block before the change, and its answer is the cold run's."""

import random
from typing import Any

import pytest

from schemas.job import Job, Message
from services.text.prompt import resolve_prompt
from tests.golden.passages import PASSAGES, SYSTEM
from tests.pipeline.conftest import Pipelines
from tests.pipeline.local import LocalPipeline

NUM_CUTS = 20
GREEDY: dict[str, Any] = {"max_tokens": 3, "temperature": 0.0, "ignore_eos": True}


async def test_a_cut_anywhere_keeps_every_block_before_it(tiny_pipelines: Pipelines):
    rng = random.Random(4)
    async with tiny_pipelines() as pipeline:
        ids = [rng.randrange(3, pipeline.text.vocab_size) for _ in range(900)]
        await check_cuts(pipeline, ids, rng)


async def test_an_edited_last_turn_keeps_every_block_before_it(tiny_pipelines: Pipelines):
    async with tiny_pipelines() as pipeline:
        await check_last_turn(pipeline, [PASSAGES[0][:300], PASSAGES[1][:300], "What?"])


@pytest.mark.slow
@pytest.mark.timeout(280)
async def test_a_chat_of_2000_tokens_is_edited_and_cut(pipelines: Pipelines):
    rng = random.Random(5)
    async with pipelines("bfloat16") as pipeline:
        ids = await check_last_turn(pipeline, [*PASSAGES * 3, "What?"][-14:], num_tokens=2000)
        await check_cuts(pipeline, ids, rng)


async def check_cuts(pipeline: LocalPipeline, ids: list[int], rng: random.Random) -> None:
    """`ids` at 20 random places: what follows is other, shorter, or nothing."""
    await pipeline.ask(prompt_token_ids=ids, **GREEDY)
    for number, cut in enumerate(sorted(rng.sample(range(1, len(ids)), NUM_CUTS))):
        other = [(ids[cut] + 1 + number) % 200 + 3 for _ in range(number % 3)]
        if other and other[0] == ids[cut]:
            other[0] += 1
        await check(pipeline, {"prompt_token_ids": ids[:cut] + other}, kept=cut)


async def check_last_turn(pipeline: LocalPipeline, turns: list[str], num_tokens: int | None = None) -> list[int]:
    """The ids of the chat, of about `num_tokens`."""

    def chat(last: str) -> dict[str, Any]:
        roles = ["assistant", "user"]
        said = [{"role": roles[n % 2], "content": text} for n, text in enumerate([*turns[:-1], last], len(turns) % 2)]
        return {"messages": [{"role": "system", "content": SYSTEM}, *said]}

    def ids_of(job: dict[str, Any]) -> list[int]:
        return resolve_prompt(Job(messages=[Message(**message) for message in job["messages"]]), pipeline.text)

    while num_tokens is not None and len(ids_of(chat(turns[-1]))) > num_tokens:
        del turns[:2]
    before = ids_of(chat(turns[-1]))
    await pipeline.ask(**chat(turns[-1]), **GREEDY)
    edited = chat("Why is that so?")
    after = ids_of(edited)
    kept = next(n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b)
    await check(pipeline, edited, kept, num_prompt=len(after))
    return before


async def check(pipeline: LocalPipeline, job: dict[str, Any], kept: int, num_prompt: int = 0) -> None:
    """`kept`: how many of its first tokens are as they were."""
    block_tokens = pipeline.prefill.pool.block_tokens
    num_prompt = num_prompt or len(job["prompt_token_ids"])
    warm = await pipeline.ask(**job, **GREEDY)
    cold = await pipeline.ask(**job, **GREEDY, cache_salt=f"cold {num_prompt} {kept}")
    assert cold.start.cached_tokens == 0
    assert warm.start.cached_tokens == min(kept // block_tokens * block_tokens, num_prompt - 1)
    assert warm.essence == cold.essence
