"""Whether each block of a trace is written once, whoever writes: many processes replay it on one folder at once.

They take the requests in turn, so that those which follow each other, and share most, run at the same time. As a job
does, each looks its chain up, renews what is there and saves the rest.
"""

import multiprocessing
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.codec import PLAIN
from kvstore.geometry import Geometry
from kvstore.keys import BlockRef, Identity, block_refs, root_of
from kvstore.nvme import NvmeTier
from kvstore.store import KVStore
from schemas.blob import ElementType
from services.bench.trace import Request

Row = dict[str, str | int | float]

NUM_WRITERS = 8
BLOCK_TOKENS = 16
TTL_S = 86_400.0
MIN_RATIO = 0.99
IDENTITY = Identity(
    fingerprint=b"no-model",
    tokenizer_hash=b"no-words",
    arithmetic=b"nothing!",
    dtype=ElementType.BFLOAT16,
    block_tokens=BLOCK_TOKENS,
)
GEOMETRY = Geometry(1, 1, 16, ElementType.BFLOAT16)  # 1 kB a block


def run(requests: Sequence[Request], num_writers: int = NUM_WRITERS) -> Iterator[Row]:
    """One row. `of_bound`: blocks that were found instead of written, as a part of those that could be."""
    chains = [request.blocks for request in requests]
    accesses = sum(map(len, chains))
    distinct = len({block for chain in chains for block in chain})
    started_s = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="kvrelay-bench-") as folder:
        writes = replay(Path(folder), chains, num_writers)
        stored = sum(1 for _ in Path(folder).glob("blocks/*/*/*.kvb"))
    seconds = time.perf_counter() - started_s
    yield {
        "bench": "dedupe",
        "writers": num_writers,
        "accesses": accesses,
        "distinct": distinct,
        "stored": stored,
        "writes": writes,
        "of_bound": round((accesses - writes) / max(1, accesses - distinct), 4),
        "min_of_bound": MIN_RATIO,
        "distinct_of_writes": round(distinct / max(1, writes), 4),
        "blocks_per_s": round(accesses / seconds),
    }


def replay(folder: Path, chains: Sequence[Sequence[int]], num_writers: int) -> int:
    """The number of blocks written, over all writers."""
    context = multiprocessing.get_context("spawn")
    turn, writes = context.Value("l", -1), context.Value("l", 0)
    ready = context.Barrier(num_writers)
    writers = [_started(context, (folder, chains, turn, writes, ready)) for _ in range(num_writers)]
    for writer in writers:
        writer.join()
    if any(writer.exitcode for writer in writers):
        raise RuntimeError("a writer failed")
    return int(writes.value)


def _started(context: SpawnContext, arguments: tuple[Any, ...]) -> SpawnProcess:
    writer = context.Process(target=_write, args=arguments)
    writer.start()
    return writer


def _write(folder: Path, chains: Sequence[Sequence[int]], turn: Any, writes: Any, ready: Any) -> None:
    with NvmeTier(folder, 10**12) as tier:
        store = KVStore([tier], IDENTITY, GEOMETRY, PLAIN)
        ready.wait()
        while (number := _take_turn(turn)) < len(chains):
            _use(store, refs_of(chains[number]))
        with writes.get_lock():
            writes.value += store.counters.writes


def _take_turn(turn: Any) -> int:
    with turn.get_lock():
        turn.value += 1
        return int(turn.value)


def _use(store: KVStore, refs: Sequence[BlockRef]) -> None:
    num_stored = store.lookup(refs)
    store.renew(refs[:num_stored], TTL_S, reused=True)
    for ref in refs[num_stored:]:
        payload = ref.key * (GEOMETRY.payload_bytes(ref.num_tokens) // len(ref.key))
        store.save(ref, memoryview(payload), TTL_S)


def refs_of(blocks: Sequence[int]) -> list[BlockRef]:
    """A chain of blocks as a chain of keys: each id stands for as many equal tokens."""
    tokens = np.repeat(np.array(blocks, np.uint32), BLOCK_TOKENS)
    return block_refs(root_of(IDENTITY, "default"), tokens, BLOCK_TOKENS)
