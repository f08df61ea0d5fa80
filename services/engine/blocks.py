"""Between pages and the store: restores the known beginning of a sequence, saves blocks that became full.

A miss, damage, a slow or frozen store and a full disk look the same from here: fewer tokens are restored or stored,
the rest is computed. A store thread touches a page only while it copies it, and never once nobody waits for it any
more, so that a store which hangs holds threads but no pages. Knows nothing of jobs, the queue or the arithmetic.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from kvstore.keys import BlockRef, Identity, chain_refs
from kvstore.patience import Patience
from kvstore.shared_prefix import SharedPrefixes
from services.engine.flights import Flight, Flights
from services.engine.interest import Bytes, Interest
from services.engine.pages import PagePool
from services.engine.rate import Rate

log = logging.getLogger(__name__)


SAVE_BUDGET_S = 5.0  # a block takes some 10 ms; what waits so long behind others waits for a store that hangs

FEW_READS = 4
MIN_FETCH_S = 0.1  # a machine that is busy may take that long for anything

T = TypeVar("T")


class BlockStore(Protocol):
    """What of `KVStore` is used here."""

    def lookup(self, refs: Seq[BlockRef]) -> int: ...

    def renew(
        self, refs: Seq[BlockRef], ttl_s: float, *, used_at: float | None = None, reused: bool = False
    ) -> int: ...

    def load(self, ref: BlockRef, into: memoryview, patience: Patience | None = None) -> bool: ...

    def save(
        self,
        ref: BlockRef,
        page: memoryview,
        ttl_s: float,
        *,
        used_at: float | None = None,
        everywhere: bool = True,
        quickly: bool = False,
    ) -> bool: ...


class Restored(NamedTuple):
    """`pages` hold the first `tokens` tokens; the caller releases them. The first `num_stored` blocks were found in
    the store, the others were resident only. `used_at`: since when they count as used, by the wall clock."""

    pages: list[int]
    tokens: int
    num_stored: int
    used_at: float = 0.0


@dataclass
class FetchBudget:
    """How long a job may still wait for stored blocks, over all that it restores."""

    left_s: float


class Lookup(NamedTuple):
    """`num_stored`: how many leading blocks of `refs` the store has."""

    refs: list[BlockRef]
    num_stored: "asyncio.Future[int]"


class Blocks:
    """Runs the store's blocking calls on `executor`; every other method belongs to the event loop's thread."""

    def __init__(
        self,
        store: BlockStore,
        identity: Identity,
        pool: PagePool,
        executor: Executor,
        *,
        ttl_s: float,
        partial_ttl_s: float,
        fetch_budget_s: float,
        recompute: Rate | None = None,
    ) -> None:
        """`recompute`: tokens that this process computes in a second."""
        self._store = store
        self._identity = identity
        self._pool = pool
        self._executor = executor
        self._ttl_s = ttl_s
        self._partial_ttl_s = partial_ttl_s
        self._fetch_budget_s = fetch_budget_s
        self._recompute = recompute or Rate()
        self._fetched = Rate()  # blocks a second
        self._flights = Flights(pool, lambda interest, ref, page: self._start(self._load, interest, ref, page))
        self._saving: dict[bytes, asyncio.Future[bool]] = {}
        self.must_reach_all: Callable[[], bool] = lambda: False
        self._scratch = threading.local()
        self.shared = SharedPrefixes()  # what the operator pinned for all tenants

    def refs(self, tenant: str, salt: str, token_ids: Seq[int]) -> list[BlockRef]:
        """The chain of blocks of `token_ids`; the last one may be partial."""
        num_shared = self.shared.num_blocks(token_ids, self._identity.block_tokens)
        return chain_refs(self._identity, tenant, salt, token_ids, num_shared)

    def fetch_budget(self, num_tokens: int | None = None) -> FetchBudget:
        """For a job that would have to compute `num_tokens` otherwise: no longer than that would take."""
        if num_tokens is None:
            return FetchBudget(self._fetch_budget_s)
        cost_s = self._recompute.seconds_for(num_tokens, unknown=self._fetch_budget_s)
        return FetchBudget(min(self._fetch_budget_s, max(MIN_FETCH_S, cost_s)))

    def look_up(self, refs: Seq[BlockRef]) -> Lookup:
        """Starts to ask the store how many leading `refs` it has, for a `restore` of the same that comes soon."""
        return Lookup(list(refs), self._start(self._store.lookup, refs))

    async def restore(
        self,
        refs: Seq[BlockRef],
        budget: FetchBudget | None = None,
        lookup: Lookup | None = None,
        *,
        reused: bool = False,
    ) -> Restored:
        """Pages for the longest unbroken run of `refs` that is resident or stored and proves intact.

        Stops waiting when `budget` (None: one for this call) is used up: what has not arrived by then is missing.
        `reused`: other jobs have written what is found, which says that it is worth keeping.
        """
        if not refs:
            return Restored([], 0, 0)
        budget = budget or self.fetch_budget()
        clock = asyncio.get_running_loop().time
        started_s = clock()
        try:
            if lookup is None or lookup.refs != refs:
                lookup = self.look_up(refs)
            return await self._restore(lookup, started_s + budget.left_s, reused)
        finally:
            budget.left_s = max(0.0, budget.left_s - (clock() - started_s))

    async def _restore(self, lookup: Lookup, until_s: float, reused: bool) -> Restored:
        clock = asyncio.get_running_loop().time
        refs = lookup.refs
        stored = await self._within(until_s - clock(), lookup.num_stored, otherwise=0)
        known: list[int | Flight] = []
        pages: list[int] = []
        try:
            self._begin(refs, stored, until_s - clock(), known)
            await self._arrive([item for item in known if isinstance(item, Flight)], until_s - clock())
            for item in known:
                page = self._flights.claim(item) if isinstance(item, Flight) else item
                if page is None:
                    break
                pages.append(page)
        finally:
            for item in known:
                if isinstance(item, Flight):
                    self._flights.leave(item)
            self._pool.release([item for item in known[len(pages) :] if isinstance(item, int)])
        used_at, good = time.time(), len(pages)
        if asked := refs[: max(good, stored)]:  # one that came too late is in use all the same
            self._start(self._renew, asked, used_at, reused)
        return Restored(pages, sum(ref.num_tokens for ref in refs[:good]), min(stored, good), used_at)

    def _begin(self, refs: Seq[BlockRef], stored: int, left_s: float, known: list[int | Flight]) -> None:
        """Adds the leading blocks to `known`: pages that are resident, and reads of what is stored.

        Not more reads than twice what the store has lately done in the time that is left, but a few always.
        """
        num_reads = 0
        while len(known) < len(refs):
            if resident := self._pool.merge(refs[len(known) :]):
                known += resident
                continue
            num_reads += 1
            too_many = num_reads > FEW_READS and self._fetched.seconds_for(num_reads, unknown=0.0) > 2 * left_s
            if len(known) >= stored or too_many:
                return
            known.append(self._flights.join(refs[len(known)]))

    async def _arrive(self, flights: Seq[Flight], left_s: float) -> None:
        if not flights:
            return
        clock = asyncio.get_running_loop().time
        began_s = clock()
        await asyncio.wait([flight.loaded for flight in flights], timeout=left_s)
        if len(flights) >= FEW_READS and left_s > MIN_FETCH_S / 2:  # fewer, or no time, say nothing of the rate
            self._fetched.note(max(0.5, sum(flight.is_good for flight in flights)), clock() - began_s)

    async def renew(self, refs: Seq[BlockRef], used_at: float) -> None:
        """A running job still needs the chain `refs`: see `kvstore.eviction`."""
        await self._within(SAVE_BUDGET_S, self._start(self._renew, refs, used_at, False), otherwise=None)

    async def save(self, ref: BlockRef, page: int, used_at: float | None = None, *, quickly: bool = False) -> bool:
        """Stores a finished block; False if the store would not take it in time. The page must stay held until then.

        `used_at` (None: now) must be no later than that of the block's ancestors. `quickly`: somebody waits for it, so
        it is compressed later. Who saves what is being saved already waits for that.
        """
        saving = self._saving.get(ref.key)
        if saving is not None:
            return await self._within(SAVE_BUDGET_S, saving, otherwise=False)
        outcome = self._saving[ref.key] = asyncio.get_running_loop().create_future()
        interest = Interest()
        stored = False
        try:
            put = partial(self._store.save, used_at=used_at, everywhere=self.must_reach_all(), quickly=quickly)
            write = self._start(self._save, interest, ref, page, put)
            stored = await self._within(SAVE_BUDGET_S, write, otherwise=False)
        finally:
            interest.lose()
            del self._saving[ref.key]
            outcome.set_result(stored)
        return stored

    def _start(self, call: Callable[..., T], *arguments: object) -> "asyncio.Future[T]":
        """Runs a call of the store on one of its threads. What it raises is logged; it counts as a miss."""
        future = asyncio.get_running_loop().run_in_executor(self._executor, call, *arguments)
        future.add_done_callback(_log_failure)
        return future

    async def _within(self, budget_s: float, future: "asyncio.Future[T]", otherwise: T) -> T:
        await asyncio.wait([future], timeout=budget_s)
        return _result(future, otherwise)

    def _renew(self, refs: Seq[BlockRef], used_at: float, reused: bool) -> None:
        """Blocks live on from their last use, the partial one for its own short time."""
        full = [ref for ref in refs if ref.num_tokens == self._pool.block_tokens]
        self._store.renew(full, self._ttl_s, used_at=used_at, reused=reused)
        self._store.renew(refs[len(full) :], self._partial_ttl_s, used_at=used_at, reused=reused)

    def _load(self, interest: Interest, ref: BlockRef, page: int) -> bool:
        payload = self._payload_of(ref)
        if interest.lost or not self._store.load(ref, payload.data, interest.patience):
            return False
        tokens = ref.num_tokens
        return interest.copy(self._pool.leading(page, tokens), self._pool.payload_parts(payload, tokens))

    def _save(self, interest: Interest, ref: BlockRef, page: int, put: Callable[..., bool]) -> bool:
        payload, tokens = self._payload_of(ref), ref.num_tokens
        if not interest.copy(self._pool.payload_parts(payload, tokens), self._pool.leading(page, tokens)):
            return False
        ttl_s = self._ttl_s if tokens == self._pool.block_tokens else self._partial_ttl_s
        return put(ref, payload.data, ttl_s)

    def _payload_of(self, ref: BlockRef) -> Bytes:
        """Room for the block, as it is handed to the store, in this thread's reused buffer."""
        buffer: Bytes | None = getattr(self._scratch, "buffer", None)
        if buffer is None:
            buffer = self._scratch.buffer = np.empty(self._pool.page_bytes, dtype=np.uint8)
        return buffer[: self._pool.form.token_bytes * ref.num_tokens]


def _result(future: "asyncio.Future[T]", otherwise: T) -> T:
    done = future.done() and not future.cancelled() and future.exception() is None
    return future.result() if done else otherwise


def _log_failure(future: "asyncio.Future[T]") -> None:
    error = None if future.cancelled() else future.exception()
    if error is not None:
        log.error("the store failed; going on without this block", exc_info=error)
