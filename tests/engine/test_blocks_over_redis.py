"""CASES 13, from the sequence's end: who stops waiting takes the connection with him, and frees the thread at once."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kernels.page_form import PageForm
from kvstore.redis.tier import RedisTier
from kvstore.store import KVStore
from services.engine.blocks import Blocks
from services.engine.pages import PagePool
from tests.kvstore.blocks import BLOCK_TOKENS, GEOMETRY, IDENTITY
from tests.kvstore.delaying_proxy import delayed
from tests.kvstore.valkey import running

NUM_BLOCKS = 3
FOR_EVER_S = 60.0


async def test_a_cancelled_restore_leaves_no_reply_behind(tmp_path: Path) -> None:
    pool = PagePool(8, PageForm(GEOMETRY.layers, GEOMETRY.heads, BLOCK_TOKENS, GEOMETRY.head_dim), max_idle=0)
    pool.reserve(8)
    with running(tmp_path) as server, delayed(server.port, 0.0) as proxy, ThreadPoolExecutor(2) as threads:
        tier = RedisTier(proxy.url, timeout_s=FOR_EVER_S)
        store = KVStore([tier], IDENTITY, GEOMETRY)
        blocks = Blocks(store, IDENTITY, pool, threads, ttl_s=100.0, partial_ttl_s=10.0, fetch_budget_s=FOR_EVER_S)
        refs = blocks.refs("default", "", list(range(NUM_BLOCKS * BLOCK_TOKENS)))
        page = pool.take()
        for number, ref in enumerate(refs):
            pool.data[page].fill_(number + 1.0)
            assert await blocks.save(ref, page)
        pool.release([page])
        for _ in range(20):
            lookup = blocks.look_up(refs)
            await asyncio.wait([lookup.num_stored])
            await _idle(threads)
            proxy.delay_s = FOR_EVER_S
            restoring = asyncio.create_task(blocks.restore(refs, lookup=lookup))
            while not blocks._flights._shared:
                await asyncio.sleep(0)
            await asyncio.sleep(0.002)
            restoring.cancel()
            await asyncio.gather(restoring, return_exceptions=True)
            proxy.delay_s = 0.0
            restored = await asyncio.wait_for(blocks.restore(refs), 10.0)
            assert restored.tokens == NUM_BLOCKS * BLOCK_TOKENS
            assert [float(pool.data[page].max()) for page in restored.pages] == [1.0, 2.0, 3.0]
            pool.release(restored.pages)
        assert pool.num_held == 0
        tier.close()


async def _idle(threads: ThreadPoolExecutor) -> None:
    """Both have done all that was asked of them so far."""
    meeting = threading.Barrier(2)
    loop = asyncio.get_running_loop()
    await asyncio.gather(*(loop.run_in_executor(threads, meeting.wait, 10.0) for _ in range(2)))
