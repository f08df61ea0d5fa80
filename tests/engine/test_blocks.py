"""Blocks come back as they were, or not at all; and pages are free in time, whatever the store does."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import msgspec
import pytest

from kvstore.keys import BlockRef
from services.engine import blocks as blocks_module
from services.engine import saver as saver_module
from services.engine.blocks import Blocks
from services.engine.pages import PagePool
from services.engine.saver import RENEW_AFTER_S, Saver
from services.engine.sequence import Sequence
from tests.engine.stub_engine import BLOCK_TOKENS, make_pool
from tests.engine.stub_store import StubStore
from tests.kvstore.blocks import IDENTITY

NUM_PAGES = 8
TOKENS = list(range(2 * BLOCK_TOKENS + 5))  # two full blocks and a partial one


class Bench:
    def __init__(self, executor: ThreadPoolExecutor, fetch_budget_s: float = 5.0) -> None:
        self.store = StubStore()
        self.pool: PagePool = make_pool(NUM_PAGES)
        self.executor = executor
        self.blocks = Blocks(
            self.store,  # type: ignore[arg-type]
            IDENTITY,
            self.pool,
            executor,
            ttl_s=10,
            partial_ttl_s=1,
            fetch_budget_s=fetch_budget_s,
        )
        self.refs: list[BlockRef] = self.blocks.refs("default", "", TOKENS)

    def sequence(self) -> Sequence:
        """`TOKENS`, computed: every page is filled with its number plus one."""
        sequence = Sequence(token_ids=TOKENS, pages=[], num_computed=len(TOKENS), on_computed=lambda _: None)
        for number in range(3):
            sequence.pages.append(self.pool.take())
            self.pool.data[sequence.pages[-1]].fill_(number + 1.0)
        return sequence

    async def fill(self) -> None:
        """Stores the blocks of `TOKENS` and forgets them here."""
        assert self.pool.reserve(3)
        sequence = self.sequence()
        for ref, page in zip(self.refs, sequence.pages, strict=True):
            assert await self.blocks.save(ref, page)
        self.pool.release(sequence.pages)
        self.pool.unreserve(3)

    async def threads_idle(self) -> None:
        """Until the store's threads have done all that was asked of them so far."""
        await asyncio.get_running_loop().run_in_executor(self.executor, lambda: None)


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


async def test_what_was_saved_comes_back(executor: ThreadPoolExecutor):
    bench = Bench(executor)
    await bench.fill()
    bench.pool.reserve(3)
    restored = await bench.blocks.restore(bench.refs)
    assert (restored.tokens, restored.num_stored) == (len(TOKENS), 3)
    for number, page in enumerate(restored.pages):
        used = 5 if number == 2 else BLOCK_TOKENS
        assert (bench.pool.data[page, :, :, :, :used] == number + 1.0).all()
    again = await bench.blocks.restore(bench.refs[:2])
    assert again.pages == restored.pages[:2], "full blocks are shared"
    await bench.threads_idle()
    assert set(bench.store.renewed) == {ref.key for ref in bench.refs}
    assert not bench.store.reused, "decode's own use is no other job's"
    third = await bench.blocks.restore(bench.refs, reused=True)
    await bench.threads_idle()
    assert bench.store.reused == {ref.key for ref in bench.refs}
    bench.pool.release(third.pages)
    bench.pool.release([*restored.pages, *again.pages])
    bench.pool.check_integrity()


async def test_resident_blocks_with_other_tokens_are_not_believed(executor: ThreadPoolExecutor):
    bench = Bench(executor)
    await bench.fill()
    bench.pool.reserve(3)
    restored = await bench.blocks.restore(bench.refs[:1])
    bench.pool.release(restored.pages)
    forged = msgspec.structs.replace(bench.refs[0], token_hash=b"other token ids!")
    other = await bench.blocks.restore([forged])
    assert other.pages and other.pages != restored.pages, "it is the store that decides"
    bench.pool.release(other.pages)


async def test_blocks_that_only_we_have_are_told_apart(executor: ThreadPoolExecutor):
    bench = Bench(executor)
    await bench.fill()
    bench.pool.reserve(3)
    bench.pool.release((await bench.blocks.restore(bench.refs)).pages)
    del bench.store.stored[bench.refs[1].key]
    restored = await bench.blocks.restore(bench.refs)
    assert (restored.tokens, restored.num_stored) == (2 * BLOCK_TOKENS, 1)
    bench.pool.release(restored.pages)


async def test_a_frozen_store_costs_the_budget_and_no_pages(executor: ThreadPoolExecutor):
    bench = Bench(executor, fetch_budget_s=0.05)
    await bench.fill()
    bench.store.gate.clear()
    bench.pool.reserve(NUM_PAGES)
    try:
        restored = await asyncio.wait_for(bench.blocks.restore(bench.refs), 5)
        assert restored.pages == [] and bench.pool.num_held == 0
    finally:
        bench.store.gate.set()


async def test_a_budget_is_spent_once_over_all_that_a_job_restores(executor: ThreadPoolExecutor):
    bench = Bench(executor, fetch_budget_s=0.05)
    await bench.fill()
    bench.pool.reserve(NUM_PAGES)
    resident = await bench.blocks.restore(bench.refs[:1])
    bench.store.gate.clear()
    budget = bench.blocks.fetch_budget()
    try:
        assert (await bench.blocks.restore(bench.refs[1:], budget)).tokens == 0
        assert budget.left_s == 0.0
        bench.blocks._fetch_budget_s = 60.0
        again = await asyncio.wait_for(bench.blocks.restore(bench.refs, budget), 5)
        assert again.tokens == BLOCK_TOKENS, "what is resident costs no time"
    finally:
        bench.store.gate.set()
    bench.pool.release([*resident.pages, *again.pages])


class LookupPasses(StubStore):
    """Hangs in loads only."""

    def lookup(self, refs):
        return len(refs)


async def test_a_late_load_writes_into_nobodys_page(executor: ThreadPoolExecutor):
    bench = Bench(executor, fetch_budget_s=0.05)
    await bench.fill()
    slow = LookupPasses()
    slow.stored = bench.store.stored
    bench.blocks._store = slow  # type: ignore[assignment]
    bench.pool.reserve(NUM_PAGES)
    slow.gate.clear()
    restored = await bench.blocks.restore(bench.refs)
    assert restored.tokens == 0 and bench.pool.num_held == 0
    pages = [bench.pool.take() for _ in range(NUM_PAGES)]  # all of them: the budget must not have cost any
    bench.pool.data.fill_(9.0)
    slow.gate.set()
    await bench.threads_idle()
    assert (bench.pool.data == 9.0).all()
    assert slow.num_loads == 1, "loads that had not begun are not made any more"
    bench.pool.release(pages)


async def test_cancelled_in_the_middle_everything_is_given_back(executor: ThreadPoolExecutor):
    bench = Bench(executor)
    await bench.fill()
    bench.blocks._store = slow = LookupPasses()  # type: ignore[assignment]
    slow.gate.clear()
    bench.pool.reserve(3)
    restoring = asyncio.create_task(bench.blocks.restore(bench.refs))
    while not slow.num_loads:
        await asyncio.sleep(0)
    restoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await restoring
    bench.pool.unreserve(3)
    assert bench.pool.num_held == 0
    bench.pool.check_integrity()
    slow.gate.set()


async def test_a_store_that_raises_costs_only_the_blocks(executor: ThreadPoolExecutor):
    bench = Bench(executor)
    await bench.fill()
    bench.store.error = RuntimeError("a bug in the store")
    bench.pool.reserve(3)
    assert (await bench.blocks.restore(bench.refs)).tokens == 0
    saver = Saver(bench.blocks, bench.pool, partial(bench.blocks.refs, "default", ""))
    sequence = bench.sequence()
    saver.save_block(sequence, 0)
    assert await saver.stored_blocks(0) == 0
    bench.pool.release(sequence.pages)
    assert bench.pool.num_held == 0


async def test_a_saver_holds_pages_until_they_are_copied(executor: ThreadPoolExecutor):
    bench = Bench(executor)
    bench.pool.reserve(3)
    sequence = bench.sequence()
    saver = Saver(bench.blocks, bench.pool, partial(bench.blocks.refs, "default", ""))
    bench.store.gate.clear()
    for block in (0, 1):
        saver.save_block(sequence, block)
    saver.save_partial(sequence)
    bench.pool.release(sequence.pages)
    bench.pool.unreserve(3)
    bench.pool.check_integrity()
    assert bench.pool.num_held == 3, "the job is over, the writes are not"
    bench.store.gate.set()
    assert await saver.stored_blocks(0) == 3
    assert bench.pool.num_held == 0 and bench.pool.num_unreserved == NUM_PAGES
    assert [bench.store.stored[ref.key][:4] for ref in bench.refs] == [
        b"\x00\x00\x80\x3f",
        b"\x00\x00\x00\x40",
        b"\x00\x00\x40\x40",
    ]
    assert len(bench.store.stored[bench.refs[2].key]) == bench.pool.page_bytes * 5 // BLOCK_TOKENS


async def test_a_hanging_store_keeps_no_pages(executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(blocks_module, "SAVE_BUDGET_S", 0.05)
    bench = Bench(executor)
    bench.pool.reserve(3)
    sequence = bench.sequence()
    saver = Saver(bench.blocks, bench.pool, partial(bench.blocks.refs, "default", ""))
    bench.store.gate.clear()
    for block in (0, 1):
        saver.save_block(sequence, block)
    bench.pool.release(sequence.pages)
    bench.pool.unreserve(3)
    assert await asyncio.wait_for(saver.stored_blocks(0), 5) == 0
    assert bench.pool.num_held == 0
    bench.store.gate.set()
    await bench.threads_idle()
    assert list(bench.store.stored) == [bench.refs[0].key], "what nobody waits for is not begun"


async def test_only_an_unbroken_run_counts_as_stored(executor: ThreadPoolExecutor):
    bench = Bench(executor)
    bench.pool.reserve(3)
    sequence = bench.sequence()
    saver = Saver(bench.blocks, bench.pool, partial(bench.blocks.refs, "default", ""))
    saver.save_block(sequence, 1)
    assert await saver.stored_blocks(0) == 0
    assert await saver.stored_blocks(1) == 2
    bench.pool.release(sequence.pages)


async def test_a_saver_dates_a_chain_by_one_time_and_moves_it_on(
    executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
):
    """CASES 9: who touches a later block touches its ancestors, and never so that they seem older than it."""
    bench = Bench(executor)
    bench.pool.reserve(3)
    sequence = bench.sequence()
    saver = Saver(bench.blocks, bench.pool, partial(bench.blocks.refs, "default", ""))
    times = iter([1000.0, 1000.0 + RENEW_AFTER_S / 2, 1000.0 + RENEW_AFTER_S])
    monkeypatch.setattr(saver_module, "time", SimpleNamespace(time=lambda: next(times)))
    used_at = bench.store.used_at
    for block in (0, 1):
        saver.save_block(sequence, block)
    assert await saver.stored_blocks(0) == 2
    assert [used_at[ref.key] for ref in bench.refs[:2]] == [1000.0, 1000.0]
    saver.save_partial(sequence)
    assert await saver.stored_blocks(0) == 3
    assert [used_at[ref.key] for ref in bench.refs] == [1000.0 + RENEW_AFTER_S] * 3
    bench.pool.release(sequence.pages)


async def test_a_saver_that_stores_nothing_holds_what_there_is(
    executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
):
    bench = Bench(executor)
    await bench.fill()
    bench.pool.reserve(3)
    sequence = bench.sequence()
    saver = Saver(bench.blocks, bench.pool, partial(bench.blocks.refs, "default", ""), used_at=1000.0)
    times = iter([1000.0 + RENEW_AFTER_S / 2, 1000.0 + 2 * RENEW_AFTER_S])
    monkeypatch.setattr(saver_module, "time", SimpleNamespace(time=lambda: next(times)))
    saver.hold(sequence, len(TOKENS))
    await asyncio.sleep(0)
    await bench.threads_idle()
    assert bench.store.renewed == []
    saver.hold(sequence, BLOCK_TOKENS)
    await asyncio.sleep(0)
    await bench.threads_idle()
    assert bench.store.renewed == [bench.refs[0].key]
    bench.pool.release(sequence.pages)


async def test_sequences_that_want_the_same_block_share_one_read(executor: ThreadPoolExecutor):
    bench = Bench(executor)
    await bench.fill()
    bench.blocks._store = slow = LookupPasses()  # type: ignore[assignment]
    slow.stored = bench.store.stored
    bench.pool.reserve(NUM_PAGES)
    slow.gate.clear()
    restoring = [asyncio.create_task(bench.blocks.restore(bench.refs[:2])) for _ in range(3)]
    while not slow.num_loads:
        await asyncio.sleep(0)
    slow.gate.set()
    first, *others = await asyncio.gather(*restoring)
    assert slow.num_loads == 2, "one for each block"
    assert first.tokens == 2 * BLOCK_TOKENS and all(other.pages == first.pages for other in others)
    assert bench.pool.num_held == 2
    for restored in (first, *others):
        bench.pool.release(restored.pages)
    assert bench.pool.num_held == 0
    bench.pool.check_integrity()


async def test_a_shared_read_goes_on_while_anybody_waits_for_it():
    """Who began it is cancelled; the second gets the block, and nothing is left held."""
    with ThreadPoolExecutor(2) as executor:
        bench = Bench(executor)
        await bench.fill()
        bench.blocks._store = slow = LookupPasses()  # type: ignore[assignment]
        slow.stored = bench.store.stored
        bench.pool.reserve(2)
        slow.gate.clear()
        first = asyncio.create_task(bench.blocks.restore(bench.refs[:1]))
        while not slow.num_loads:
            await asyncio.sleep(0)
        second = asyncio.create_task(bench.blocks.restore(bench.refs[:1]))
        (flight,) = bench.blocks._flights._shared.values()
        while flight.num_waiting < 2:
            await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        slow.gate.set()
        restored = await second
        assert restored.tokens == BLOCK_TOKENS and slow.num_loads == 1
        bench.pool.release(restored.pages)
        assert bench.pool.num_held == 0 and not bench.blocks._flights._shared
        bench.pool.check_integrity()


async def test_partial_blocks_are_read_for_each(executor: ThreadPoolExecutor):
    """Each sequence goes on writing into its own."""
    bench = Bench(executor)
    await bench.fill()
    bench.pool.reserve(6)
    one, other = await asyncio.gather(*(bench.blocks.restore(bench.refs) for _ in range(2)))
    assert one.pages[:2] == other.pages[:2] and one.pages[2] != other.pages[2]
    bench.pool.release([*one.pages, *other.pages])
    assert bench.pool.num_held == 0


async def test_saves_of_the_same_block_share_one_write(executor: ThreadPoolExecutor):
    bench = Bench(executor)
    bench.pool.reserve(6)
    sequences = [bench.sequence(), bench.sequence()]
    bench.store.gate.clear()
    saving = [asyncio.create_task(bench.blocks.save(bench.refs[0], each.pages[0])) for each in sequences]
    while not bench.store.num_saves:
        await asyncio.sleep(0)
    bench.store.gate.set()
    assert await asyncio.gather(*saving) == [True, True]
    assert bench.store.num_saves == 1
    assert await bench.blocks.save(bench.refs[0], sequences[0].pages[0]) and bench.store.num_saves == 2


async def test_a_fetch_may_take_what_computing_would(executor: ThreadPoolExecutor):
    bench = Bench(executor, fetch_budget_s=2.0)
    assert bench.blocks.fetch_budget(1000).left_s == 2.0, "nothing was measured yet"
    bench.blocks._recompute.note(1000, 1.0)
    budgets = [bench.blocks.fetch_budget(num_tokens).left_s for num_tokens in (10, 1000, 100_000)]
    assert budgets == [blocks_module.MIN_FETCH_S, 1.0, 2.0]


async def test_what_cannot_arrive_in_time_is_not_asked_for(executor: ThreadPoolExecutor):
    """By the rate that was measured; a few are always tried, so that it is measured again."""
    bench = Bench(executor, fetch_budget_s=1.0)
    bench.store.stored = {ref.key: bytes(bench.pool.page_bytes) for ref in bench.refs}
    refs = bench.blocks.refs("default", "", list(range(7 * BLOCK_TOKENS)))
    bench.store.stored = {ref.key: bytes(bench.pool.page_bytes) for ref in refs}
    bench.blocks._fetched.note(1, 1.0)
    bench.pool.reserve(NUM_PAGES)
    restored = await bench.blocks.restore(refs)
    assert len(restored.pages) == blocks_module.FEW_READS == bench.store.num_loads
    bench.pool.release(restored.pages)
    assert bench.blocks._fetched.per_s > 10, "it was quicker this time"
    again = await bench.blocks.restore(refs)
    assert len(again.pages) == 7
    bench.pool.release(again.pages)
