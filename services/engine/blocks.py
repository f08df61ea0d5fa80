"""Between pages and the store: restores the known beginning of a sequence, saves blocks that became full.

A miss, damage, a slow or frozen store and a full disk look the same from here: fewer tokens are restored or stored,
the rest is computed. A store thread touches a page only while it copies it, and never once nobody waits for it any
more, so that a store which hangs holds threads but no pages. Knows nothing of jobs, the queue or the arithmetic.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.keys import BlockRef, Identity, chain_refs
from kvstore.shared_prefix import SharedPrefixes
from kvstore.store import KVStore
from services.engine.pages import PagePool

log = logging.getLogger(__name__)


SAVE_BUDGET_S = 5.0  # a block takes some 10 ms; what waits so long behind others waits for a store that hangs

Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")


class Restored(NamedTuple):
    """`pages` hold the first `tokens` tokens; the caller releases them. The first `num_stored` blocks were found in
    the store, the others were resident only."""

    pages: list[int]
    tokens: int
    num_stored: int


@dataclass
class FetchBudget:
    """How long a job may still wait for stored blocks, over all that it restores."""

    left_s: float


class Lookup(NamedTuple):
    """`num_stored`: how many leading blocks of `refs` the store has."""

    refs: list[BlockRef]
    num_stored: "asyncio.Future[int]"


class Interest:
    """Whether somebody still waits for a block. A thread copies to or from a page only while that is so."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lost = False

    def lose(self) -> None:
        """From the return on, no thread touches the page. Waits for a copy under way, some 0.2 ms."""
        with self._lock:
            self._lost = True

    @property
    def lost(self) -> bool:
        return self._lost

    def copy(self, target: Bytes, source: Bytes) -> bool:
        """False, and nothing done, once nobody waits."""
        with self._lock:
            if not self._lost:
                np.copyto(target, source)
            return not self._lost


class Blocks:
    """Runs the store's blocking calls on `executor`; every other method belongs to the event loop's thread."""

    def __init__(
        self,
        store: KVStore,
        identity: Identity,
        pool: PagePool,
        executor: Executor,
        *,
        ttl_s: float,
        partial_ttl_s: float,
        fetch_budget_s: float,
    ) -> None:
        self._store = store
        self._identity = identity
        self._pool = pool
        self._executor = executor
        self._ttl_s = ttl_s
        self._partial_ttl_s = partial_ttl_s
        self._fetch_budget_s = fetch_budget_s
        self._scratch = threading.local()
        self.shared = SharedPrefixes()  # what the operator pinned for all tenants

    def refs(self, tenant: str, salt: str, token_ids: Seq[int]) -> list[BlockRef]:
        """The chain of blocks of `token_ids`; the last one may be partial."""
        num_shared = self.shared.num_blocks(token_ids, self._identity.block_tokens)
        return chain_refs(self._identity, tenant, salt, token_ids, num_shared)

    def fetch_budget(self) -> FetchBudget:
        return FetchBudget(self._fetch_budget_s)

    def look_up(self, refs: Seq[BlockRef]) -> Lookup:
        """Starts to ask the store how many leading `refs` it has, for a `restore` of the same that comes soon."""
        return Lookup(list(refs), self._start(self._store.lookup, refs))

    async def restore(
        self, refs: Seq[BlockRef], budget: FetchBudget | None = None, lookup: Lookup | None = None
    ) -> Restored:
        """Pages for the longest unbroken run of `refs` that is resident or stored and proves intact.

        Stops waiting when `budget` (None: one for this call) is used up: what has not arrived by then is missing.
        """
        if not refs:
            return Restored([], 0, 0)
        budget = budget or self.fetch_budget()
        clock = asyncio.get_running_loop().time
        started_s = clock()
        try:
            if lookup is None or lookup.refs != refs:
                lookup = self.look_up(refs)
            return await self._restore(lookup, started_s + budget.left_s)
        finally:
            budget.left_s = max(0.0, budget.left_s - (clock() - started_s))

    async def _restore(self, lookup: Lookup, until_s: float) -> Restored:
        clock = asyncio.get_running_loop().time
        refs = lookup.refs
        stored = await self._within(until_s - clock(), lookup.num_stored, otherwise=0)
        pages: list[int] = []
        loads: dict[int, asyncio.Future[bool]] = {}
        interests: list[Interest] = []
        good = 0
        try:
            for i, ref in enumerate(refs):
                page = self._pool.share(ref.key, ref.token_hash)
                if page is None and i >= stored:
                    break
                if page is None:
                    page = self._pool.take()
                    interests.append(Interest())
                    loads[i] = self._start(self._load, interests[-1], ref, page)
                pages.append(page)
            if loads:
                await asyncio.wait(loads.values(), timeout=until_s - clock())
            good = next((i for i, load in loads.items() if not _result(load, False)), len(pages))
        finally:
            for interest in interests:
                interest.lose()
            self._pool.release(pages[good:])
        self._adopt(refs[:good], pages, loads)
        return Restored(pages[:good], sum(ref.num_tokens for ref in refs[:good]), min(stored, good))

    async def save(self, ref: BlockRef, page: int) -> bool:
        """Stores a finished block; False if the store would not take it in time. The page must stay held until then."""
        interest = Interest()
        try:
            saving = self._start(self._save, interest, ref, page)
            return await self._within(SAVE_BUDGET_S, saving, otherwise=False)
        finally:
            interest.lose()

    def _adopt(self, refs: Seq[BlockRef], pages: Seq[int], loads: dict[int, "asyncio.Future[bool]"]) -> None:
        """`refs` are in `pages`: those that were loaded may be shared from now on, and all live on in the store."""
        for i, ref in enumerate(refs):
            if i in loads and ref.num_tokens == self._pool.block_tokens:
                self._pool.name(pages[i], ref.key, ref.token_hash)
        if refs:
            self._start(self._renew, refs)

    def _start(self, call: Callable[..., T], *arguments: object) -> "asyncio.Future[T]":
        """Runs a call of the store on one of its threads. What it raises is logged; it counts as a miss."""
        future = asyncio.get_running_loop().run_in_executor(self._executor, call, *arguments)
        future.add_done_callback(_log_failure)
        return future

    async def _within(self, budget_s: float, future: "asyncio.Future[T]", otherwise: T) -> T:
        await asyncio.wait([future], timeout=budget_s)
        return _result(future, otherwise)

    def _renew(self, refs: Seq[BlockRef]) -> None:
        """Blocks live on from their last use, the partial one for its own short time."""
        full = [ref for ref in refs if ref.num_tokens == self._pool.block_tokens]
        self._store.renew(full, self._ttl_s)
        self._store.renew(refs[len(full) :], self._partial_ttl_s)

    def _load(self, interest: Interest, ref: BlockRef, page: int) -> bool:
        target = self._pool.leading(page, ref.num_tokens)
        scratch = self._scratch_like(target)
        if interest.lost or not self._store.load(ref, scratch.reshape(-1).data):
            return False
        return interest.copy(target, scratch)

    def _save(self, interest: Interest, ref: BlockRef, page: int) -> bool:
        source = self._pool.leading(page, ref.num_tokens)
        scratch = self._scratch_like(source)
        if not interest.copy(scratch, source):
            return False
        ttl_s = self._ttl_s if ref.num_tokens == self._pool.block_tokens else self._partial_ttl_s
        return self._store.save(ref, scratch.reshape(-1).data, ttl_s=ttl_s)

    def _scratch_like(self, array: Bytes) -> Bytes:
        """A contiguous array of the same shape over this thread's reused buffer."""
        buffer: Bytes | None = getattr(self._scratch, "buffer", None)
        if buffer is None:
            buffer = self._scratch.buffer = np.empty(self._pool.page_bytes, dtype=np.uint8)
        return buffer[: array.size].reshape(array.shape)


def _result(future: "asyncio.Future[T]", otherwise: T) -> T:
    done = future.done() and not future.cancelled() and future.exception() is None
    return future.result() if done else otherwise


def _log_failure(future: "asyncio.Future[T]") -> None:
    error = None if future.cancelled() else future.exception()
    if error is not None:
        log.error("the store failed; going on without this block", exc_info=error)
