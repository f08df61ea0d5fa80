"""CASES 26: a long prompt holds up no short ones, and short ones never keep a long one waiting."""

import asyncio
from typing import Any

import pytest

from schemas.events import Event, Start, Token
from services.bus.history import read_all
from tests.pipeline.conftest import Pipelines
from tests.pipeline.local import LocalPipeline

SCHEDULER = {"chunk_tokens": 16, "token_budget": 64}
MAX_OVERTAKES = 50


def prompt_of(num_tokens: int, salt: int) -> dict[str, Any]:
    """Nothing of it is stored already."""
    ids = [3 + (number * 7 + salt) % 250 for number in range(num_tokens)]
    return {"prompt_token_ids": ids, "max_tokens": 1, "seed": 1, "ignore_eos": True, "cache_salt": str(salt)}


async def stored_at(pipeline: LocalPipeline, job: str, kind: type[Event]) -> int:
    """The place of its first such event among those of all jobs."""
    messages = await read_all(pipeline.bus, "default", job)
    return next(m.sequence for m in messages if any(isinstance(event, kind) for event in m.events))


async def test_short_prompts_pass_a_long_one_that_is_being_computed(
    tiny_pipelines: Pipelines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While nobody else has anything to compute it waits here, however slowly the others come."""
    async with tiny_pipelines(scheduler=SCHEDULER) as pipeline:
        batch, engine = pipeline.prefill_worker.role.batch, pipeline.prefill.engine
        run, join = engine.run, batch.join
        are_done, has_begun, joined = False, asyncio.Event(), asyncio.Event()
        came: list[Any] = []  # the long one's sequence is the first

        def joining(sequence: Any) -> None:
            came.append(sequence)
            join(sequence)
            joined.set()

        async def waiting(works: Any) -> Any:
            has_begun.set()
            while came[0].num_missing and not any(other.num_missing for other in came[1:]) and not are_done:
                joined.clear()
                await joined.wait()
            return await run(works)

        monkeypatch.setattr(batch, "join", joining)
        monkeypatch.setattr(engine, "run", waiting)
        long = await pipeline.submit(**prompt_of(1000, salt=0))  # 63 chunks
        async with asyncio.timeout(60):
            await has_begun.wait()
            short = [await pipeline.submit(**prompt_of(5 + number % 8, salt=number)) for number in range(1, 21)]
            await asyncio.gather(*(pipeline.read(job) for job in short))
            are_done = True
            joined.set()
            await pipeline.read(long)
        last_short = max([await stored_at(pipeline, job, Token) for job in short])
        assert last_short < await stored_at(pipeline, long, Token)


async def test_a_long_prompt_starts_in_a_constant_flow_of_short_ones(tiny_pipelines: Pipelines) -> None:
    async with tiny_pipelines(scheduler={**SCHEDULER, "max_sequences": 4}) as pipeline:
        names: list[str] = []
        is_over = False

        async def flow(first: int) -> None:
            number = first
            while not is_over:
                job = await pipeline.submit(**prompt_of(20, salt=number))
                names.append(job)
                await pipeline.read(job)
                number += 8

        async with asyncio.timeout(90):
            flows = [asyncio.create_task(flow(number)) for number in range(1, 9)]
            while len(names) < 16:
                await asyncio.sleep(0.01)
            before = len(names)
            long = await pipeline.submit(**prompt_of(320, salt=0))
            await pipeline.read(long)
            is_over = True
            await asyncio.gather(*flows)
        began = await stored_at(pipeline, long, Start)
        later = [await stored_at(pipeline, job, Start) for job in names[before:]]
        assert sum(place < began for place in later) <= MAX_OVERTAKES
