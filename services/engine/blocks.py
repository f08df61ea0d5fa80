"""Between pages and the store: restores the known beginning of a sequence, saves blocks that became full.

A miss, damage, a slow store and a full disk look the same from here: fewer tokens are restored, the rest is
computed. Knows nothing of jobs, the queue or the model's arithmetic.
"""

import asyncio
import logging
import threading
from collections.abc import Sequence as Seq
from concurrent.futures import Executor
from functools import partial
from typing import NamedTuple

import torch

from kvstore.keys import BlockRef, Identity, block_refs, root_key
from kvstore.store import KVStore
from services.engine.pages import PagePool

log = logging.getLogger(__name__)


class Restored(NamedTuple):
    """`pages` hold the first `tokens` tokens; the caller releases them."""

    pages: list[int]
    tokens: int


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

    def refs(self, tenant: str, salt: str, token_ids: Seq[int]) -> list[BlockRef]:
        """The chain of blocks of `token_ids`; the last one may be partial."""
        return block_refs(root_key(self._identity, tenant, salt), token_ids, self._identity.block_tokens)

    async def restore(self, refs: Seq[BlockRef]) -> Restored:
        """Pages for the longest unbroken run of `refs` that is resident or stored and proves intact.

        Stops waiting after the fetch budget: what has not arrived by then counts as missing.
        """
        pages: list[int] = []
        loads: dict[int, asyncio.Future[bool]] = {}
        loop = asyncio.get_running_loop()
        stored = await loop.run_in_executor(self._executor, self._store.lookup, refs) if refs else 0
        for i, ref in enumerate(refs):
            page = self._pool.share(ref.key, ref.token_hash)
            if page is None:
                if i >= stored:
                    break
                page = self._pool.take()
                loads[i] = loop.run_in_executor(self._executor, self._load, ref, page)
            pages.append(page)
        try:
            if loads:
                await asyncio.wait(loads.values(), timeout=self._fetch_budget_s)
        except asyncio.CancelledError:
            self._release_from(0, pages, loads)
            raise
        good = next((i for i, load in loads.items() if not _arrived(load)), len(pages))
        self._release_from(good, pages, loads)
        self._executor.submit(self._renew, refs[:good])
        for i, ref in enumerate(refs[:good]):
            if i in loads and ref.num_tokens == self._pool.block_tokens:
                self._pool.name(pages[i], ref.key, ref.token_hash)
        return Restored(pages[:good], sum(ref.num_tokens for ref in refs[:good]))

    async def save(self, ref: BlockRef, page: int) -> bool:
        """Stores a finished block; False if the store would not take it. The page must stay held until then."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._save, ref, page)

    def _renew(self, refs: Seq[BlockRef]) -> None:
        """Blocks live on from their last use, the partial one for its own short time."""
        full = [ref for ref in refs if ref.num_tokens == self._pool.block_tokens]
        self._store.renew(full, self._ttl_s)
        self._store.renew(refs[len(full) :], self._partial_ttl_s)

    def _load(self, ref: BlockRef, page: int) -> bool:
        if ref.num_tokens == self._pool.block_tokens:
            return self._store.load(ref, self._pool.payload(page))
        target = self._pool.leading(page, ref.num_tokens)
        scratch = self._scratch_tensor(target)
        if not self._store.load(ref, _bytes_of(scratch)):
            return False
        target.copy_(scratch)
        return True

    def _save(self, ref: BlockRef, page: int) -> bool:
        if ref.num_tokens == self._pool.block_tokens:
            return self._store.save(ref, self._pool.payload(page), ttl_s=self._ttl_s)
        source = self._pool.leading(page, ref.num_tokens)
        scratch = self._scratch_tensor(source)
        scratch.copy_(source)
        return self._store.save(ref, _bytes_of(scratch), ttl_s=self._partial_ttl_s)

    def _scratch_tensor(self, like: torch.Tensor) -> torch.Tensor:
        """A contiguous tensor of `like`'s shape over this thread's reused buffer."""
        buffer = getattr(self._scratch, "buffer", None)
        if buffer is None:
            buffer = self._scratch.buffer = torch.empty(self._pool.data[0].numel(), dtype=like.dtype)
        view: torch.Tensor = buffer[: like.numel()].view(like.shape)
        return view

    def _release_from(self, first: int, pages: list[int], loads: dict[int, "asyncio.Future[bool]"]) -> None:
        """Releases `pages[first:]`, each as soon as no thread writes to it any more."""
        for i in range(first, len(pages)):
            load = loads.get(i)
            if load is None or load.done():
                self._pool.release([pages[i]])
            else:
                load.add_done_callback(partial(self._release_loaded, pages[i]))

    def _release_loaded(self, page: int, _: "asyncio.Future[bool]") -> None:
        self._pool.release([page])


def _arrived(load: "asyncio.Future[bool]") -> bool:
    if not load.done() or load.cancelled():
        return False
    error = load.exception()
    if error is not None:
        log.error("the store failed to load a block; computing it instead", exc_info=error)
    return error is None and load.result()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data
