"""Saves the blocks of one sequence as they become full, beside the passes, and knows what is stored.

Knows nothing of why a sequence runs. One saver a sequence; it holds each page until its bytes are written.
"""

import asyncio

from kvstore.keys import BlockRef
from services.engine.blocks import Blocks
from services.engine.pages import PagePool
from services.engine.sequence import Sequence


class Saver:
    def __init__(self, blocks: Blocks, pool: PagePool, tenant: str, salt: str) -> None:
        self._blocks = blocks
        self._pool = pool
        self._tenant = tenant
        self._salt = salt
        self._saves: dict[int, asyncio.Task[bool]] = {}

    def save_block(self, sequence: Sequence, block: int, *, quickly: bool = False) -> None:
        """Block `block` of `sequence` is full: make it resident under its name and write it to the store.

        `quickly`: the job waits for it.
        """
        end = (block + 1) * self._pool.block_tokens
        assert end <= sequence.num_computed, "a page that is shared is never written again"
        ref = self._blocks.refs(self._tenant, self._salt, sequence.token_ids[:end])[block]
        self._pool.name(sequence.pages[block], ref.key, ref.token_hash)
        self._start(block, ref, sequence.pages[block], quickly)

    def save_partial(self, sequence: Sequence, *, quickly: bool = False) -> None:
        """Writes the last block of what is computed, if it is a partial one."""
        refs = self._blocks.refs(self._tenant, self._salt, sequence.token_ids[: sequence.num_computed])
        if refs and refs[-1].num_tokens < self._pool.block_tokens:
            self._start(len(refs) - 1, refs[-1], sequence.pages[len(refs) - 1], quickly)

    async def stored_blocks(self, num_restored: int) -> int:
        """Waits for the writes under way; the number of leading blocks that are stored, if the first
        `num_restored` were."""
        if self._saves:
            await asyncio.wait(self._saves.values())
        count = num_restored
        while count in self._saves and self._saves[count].result():
            count += 1
        return count

    def _start(self, block: int, ref: BlockRef, page: int, quickly: bool) -> None:
        self._pool.pin(page)
        save = asyncio.get_running_loop().create_task(self._blocks.save(ref, page, quickly=quickly))
        save.add_done_callback(lambda _: self._pool.unpin(page))
        self._saves[block] = save
