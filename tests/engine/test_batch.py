"""What a pass is made of, and who still holds pages while it runs."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from services.engine.batch import Batch
from services.engine.engine import Outcome
from services.engine.sequence import Sequence
from tests.engine.requests import CheapRows
from tests.engine.stub_engine import BLOCK_TOKENS, StubEngine, make_pool

SAMPLERS: Any = [object()]


def ignore(_: Outcome) -> None:
    return None


def sequence_of(
    num_tokens: int,
    num_computed: int = 0,
    on_computed: Callable[[Outcome], None] = ignore,
    *,
    gives_way: bool = False,
) -> Sequence:
    return Sequence(
        token_ids=[1] * num_tokens,
        pages=[],
        num_computed=num_computed,
        on_computed=on_computed,
        samplers=SAMPLERS,
        gives_way=gives_way,
    )


@asynccontextmanager
async def running(
    num_pages: int = 8, chunk: int = 32, budget: int = 64, slice_s: float = math.inf
) -> AsyncIterator[tuple[Batch, StubEngine]]:
    pool = make_pool(num_pages)
    pool.reserve(num_pages)
    engine = StubEngine(pool)
    batch = Batch(engine, chunk_tokens=chunk, token_budget=budget, slice_s=slice_s)  # type: ignore[arg-type]
    task = asyncio.create_task(batch.run())
    yield batch, engine
    assert not task.done(), task
    task.cancel()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def rows(works: list[Any]) -> list[tuple[int, int]]:
    return [(work.start, len(work.token_ids)) for work in works]


async def test_chunks_end_on_a_grid_of_positions():
    async with running(chunk=32) as (batch, engine):
        outcomes: list[Outcome] = []
        sequence = sequence_of(100, num_computed=10, on_computed=outcomes.append)
        sequence.pages = [engine.pool.take()]
        batch.join(sequence)
        seen = [rows(await engine.whole()) for _ in range(4)]
        assert seen == [[(10, 22)], [(32, 32)], [(64, 32)], [(96, 4)]]
        await settled()
        assert len(outcomes) == 1 and engine.is_idle
        assert len(sequence.pages) == 7
        batch.leave(sequence)


async def test_a_pass_takes_no_more_rows_than_the_budget():
    async with running(chunk=32, budget=48) as (batch, engine):
        batch.join(sequence_of(40))
        batch.join(sequence_of(40))
        batch.join(sequence_of(40))
        assert rows(await engine.whole()) == [(0, 32), (0, 16)]
        assert rows(await engine.whole()) == [(32, 8), (16, 16), (0, 24)]


async def test_who_catches_up_does_not_hold_up_who_generates():
    async with running(chunk=16, budget=18) as (batch, engine):
        for _ in range(2):
            batch.join(sequence_of(64))
        generating = [sequence_of(4, num_computed=3) for _ in range(2)]
        for sequence in generating:
            batch.join(sequence)
        assert rows(await engine.whole()) == [(3, 1), (3, 1), (0, 16)]


async def test_who_catches_up_beside_others_takes_slices():
    """Of as many rows in all as are computed in `slice_s`; and whole chunks when nobody generates."""
    async with running(chunk=16, budget=66, slice_s=0.001) as (batch, engine):
        engine.step_cost = CheapRows(0.0002)
        for _ in range(2):
            batch.join(sequence_of(48))
        assert rows(await engine.whole()) == [(0, 16), (0, 16)]
        batch.join(sequence_of(4, num_computed=3))
        assert rows(await engine.whole()) == [(3, 1), (16, 5)]


async def test_who_gives_way_waits_for_others_after_a_part_of_a_chunk():
    async with running(num_pages=16, chunk=64, budget=128) as (batch, engine):
        for _ in range(2):
            batch.join(sequence_of(48, gives_way=True))
        assert rows(await engine.whole()) == [(0, 16)], "in all, however many there are"
        batch.join(sequence_of(70))
        batch.join(sequence_of(24))
        assert rows(await engine.whole()) == [(0, 64), (0, 24)]
        assert rows(await engine.whole()) == [(64, 6)]
        assert rows(await engine.whole()) == [(16, 16)]


async def test_who_gives_way_runs_beside_those_that_generate():
    async with running(num_pages=16, chunk=16, budget=64) as (batch, engine):
        batch.join(sequence_of(4, num_computed=3))
        batch.join(sequence_of(48, gives_way=True))
        assert rows(await engine.whole()) == [(3, 1), (0, 16)]


async def test_a_slice_is_one_row_at_least():
    async with running(chunk=16, slice_s=0.001) as (batch, engine):
        engine.step_cost = CheapRows(0.5)
        batch.join(sequence_of(4, num_computed=3))
        batch.join(sequence_of(48))
        assert rows(await engine.whole()) == [(3, 1), (0, 1)]


async def test_pages_of_a_pass_stay_held_when_the_sequence_leaves_and_its_promise_ends():
    async with running(num_pages=4) as (batch, engine):
        pool = engine.pool
        sequence = sequence_of(2 * BLOCK_TOKENS)
        batch.join(sequence)
        (work,) = await engine.begun()
        batch.leave(sequence)
        pool.unreserve(4)  # its job is over, and the next one may come
        pool.check_integrity()
        assert pool.num_held == 2 and not pool.reserve(3), "two pages are still written to"
        assert pool.reserve(2)
        taken = [pool.take(), pool.take()]
        assert not set(taken) & set(work.pages)
        engine.finish()
        await settled()
        assert pool.num_held == 2 and pool.num_unreserved == 2
        pool.release(taken)


async def test_pages_that_no_pass_writes_to_are_free_at_once():
    async with running() as (batch, engine):
        batch.join(sequence_of(4))
        await engine.begun()
        other = sequence_of(4)
        other.pages = [engine.pool.take()]
        batch.join(other)
        held = engine.pool.num_held
        batch.leave(other)
        assert engine.pool.num_held == held - 1
        engine.finish()


async def test_withdrawing_waits_for_the_pass_under_way_and_no_other():
    async with running() as (batch, engine):
        mate, first, second = sequence_of(1000), sequence_of(40), sequence_of(4)
        for sequence in (first, second):
            batch.join(sequence)
        assert len(await engine.begun()) == 2
        batch.join(mate)
        withdrawal = asyncio.create_task(batch.withdraw([first, second]))
        await settled()
        assert not withdrawal.done()
        engine.finish()
        assert len(await engine.begun()) == 1, "the mate goes on"
        await asyncio.wait_for(withdrawal, 10)
        assert first.num_computed == 0 and len(first.pages) == 2, "what the pass computed does not count"
        engine.finish()


async def test_a_paused_sequence_sits_out_until_it_is_woken():
    async with running() as (batch, engine):
        paused = True
        sequence = sequence_of(4)
        sequence.is_paused = lambda: paused
        batch.join(sequence)
        await settled()
        assert engine.is_idle
        batch.join(sequence_of(3))
        assert rows(await engine.whole()) == [(0, 3)]
        await settled()
        assert engine.is_idle
        paused = False
        batch.wake()
        assert rows(await engine.whole()) == [(0, 4)]


async def test_full_blocks_are_told_once_each():
    async with running(chunk=64, budget=64) as (batch, engine):
        full: list[int] = []
        sequence = sequence_of(3 * BLOCK_TOKENS + 1, num_computed=BLOCK_TOKENS + 3)
        sequence.on_block_full = full.append
        batch.join(sequence)
        await engine.whole()
        await settled()
        assert full == [1, 2]
