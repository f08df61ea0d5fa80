"""How fast a prompt's resident blocks become a page table, beside a merge that copies their bytes."""

import hashlib
import time
from collections.abc import Callable, Iterator

import torch

from kernels.page_form import PageForm
from kvstore.keys import BlockRef
from services.engine.pages import PagePool

Row = dict[str, str | int | float]

NUM_BLOCKS = 34
PAGES = PageForm(layers=30, kv_heads=3, page_tokens=64, head_dim=64)  # SmolLM2-135M's
MEASURED_S = 0.5


def run() -> Iterator[Row]:
    """Merges/s of one core's CPU time, references taken and released: of blocks that another sequence holds, of blocks
    that nobody holds, and into memory of its own."""
    pool = PagePool(2 * NUM_BLOCKS, PAGES, max_idle=NUM_BLOCKS)
    assert pool.reserve(2 * NUM_BLOCKS)
    refs = [_ref(number) for number in range(NUM_BLOCKS)]
    pages = [pool.take() for _ in refs]
    for page, ref in zip(pages, refs, strict=True):
        pool.data[page].zero_()
        pool.name(page, ref)

    def by_reference() -> None:
        pool.release(pool.merge(refs))

    yield {"merge": "by reference, held by another", "blocks": NUM_BLOCKS, "per_s": _rate(by_reference)}
    pool.release(pages)
    idle = _rate(by_reference)
    yield {"merge": "by reference, held by nobody", "blocks": NUM_BLOCKS, "per_s": idle}
    copied = torch.empty_like(pool.data[pages])

    def by_copy() -> None:
        torch.index_select(pool.data, 0, torch.tensor(pages), out=copied)

    yield {"merge": "by copy", "blocks": NUM_BLOCKS, "per_s": _rate(by_copy)}


def _rate(merge: Callable[[], None]) -> float:
    merge()
    count, began_s = 0, time.thread_time()
    while (elapsed_s := time.thread_time() - began_s) < MEASURED_S:
        for _ in range(10):
            merge()
        count += 10
    return round(count / elapsed_s, 1)


def _ref(number: int) -> BlockRef:
    name = hashlib.blake2b(str(number).encode(), digest_size=32).digest()
    return BlockRef("default", name, name[:16], number * PAGES.page_tokens, PAGES.page_tokens)
