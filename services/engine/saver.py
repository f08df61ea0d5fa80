"""Saves the blocks of one sequence as they become full, beside the passes, and knows what is stored.

Knows nothing of why a sequence runs. One saver a sequence; it holds each page until its bytes are written. While it is
asked to save or to hold blocks, it keeps the whole chain in use: it dates all blocks by one time and moves that on now
and then, ancestors first, so that a block never seems used later than its ancestors.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial

from kvstore.eviction import LEASE_S
from kvstore.keys import BlockRef
from services.engine.blocks import Blocks
from services.engine.pages import PagePool
from services.engine.sequence import Sequence

RENEW_AFTER_S = LEASE_S / 2

Names = Callable[[list[int]], list[BlockRef]]


class Saver:
    """`names`: the blocks of some tokens. `used_at`: since when those that the sequence began with count as used."""

    def __init__(self, blocks: Blocks, pool: PagePool, names: Names, used_at: float = 0.0) -> None:
        self._blocks = blocks
        self._pool = pool
        self._names = names
        self._used_at = used_at
        self._renewal: asyncio.Task[None] | None = None
        self._saves: dict[int, asyncio.Task[bool]] = {}

    def save_block(self, sequence: Sequence, block: int, *, quickly: bool = False) -> None:
        """Block `block` of `sequence` is full: make it resident under its name and write it to the store.

        `quickly`: the job waits for it.
        """
        end = (block + 1) * self._pool.block_tokens
        assert end <= sequence.num_computed, "a page that is shared is never written again"
        refs = self._refs(sequence, end)
        self._pool.name(sequence.pages[block], refs[-1])
        self._start(refs, sequence.pages[block], quickly)

    def save_partial(self, sequence: Sequence, *, quickly: bool = False) -> None:
        """Writes the last block of what is computed, if it is a partial one."""
        refs = self._refs(sequence, sequence.num_computed)
        if refs and refs[-1].num_tokens < self._pool.block_tokens:
            self._start(refs, sequence.pages[len(refs) - 1], quickly)

    def hold(self, sequence: Sequence, num_tokens: int) -> None:
        """The blocks of the first `num_tokens` are still needed; nothing is saved."""
        self._renew_if_due(self._refs(sequence, num_tokens))

    async def stored_blocks(self, num_restored: int) -> int:
        """Waits for the writes under way; the number of leading blocks that are stored, if the first
        `num_restored` were."""
        if self._saves:
            await asyncio.wait(self._saves.values())
        count = num_restored
        while count in self._saves and self._saves[count].result():
            count += 1
        return count

    def _refs(self, sequence: Sequence, num_tokens: int) -> list[BlockRef]:
        return self._names(sequence.token_ids[:num_tokens])

    def _start(self, refs: list[BlockRef], page: int, quickly: bool) -> None:
        """Saves the last of `refs`."""
        self._renew_if_due(refs[:-1])
        self._pool.pin(page)
        put = partial(self._blocks.save, refs[-1], page, self._used_at, quickly=quickly)
        save = asyncio.get_running_loop().create_task(_after(self._renewal, put))
        save.add_done_callback(lambda _: self._pool.unpin(page))
        self._saves[len(refs) - 1] = save

    def _renew_if_due(self, refs: list[BlockRef]) -> None:
        now = time.time()
        if 0 <= now - self._used_at < RENEW_AFTER_S:
            return
        self._used_at = now
        if refs:
            self._renewal = asyncio.get_running_loop().create_task(self._renew(refs, now, list(self._saves.values())))

    async def _renew(self, refs: list[BlockRef], used_at: float, saves: "list[asyncio.Task[bool]]") -> None:
        if saves:
            await asyncio.wait(saves)  # what is not there yet cannot be renewed
        await self._blocks.renew(refs, used_at)


async def _after(renewal: "asyncio.Task[None] | None", put: Callable[[], Awaitable[bool]]) -> bool:
    """A block is dated like its ancestors, so these first."""
    if renewal is not None:
        await asyncio.wait([renewal])
    return await put()
