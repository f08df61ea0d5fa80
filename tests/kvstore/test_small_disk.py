"""CASES 24: a disk of 10 MB, with a cap below it and without one; several writers, probes all the time."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.codec import PLAIN
from kvstore.eviction import LEASE_S
from kvstore.geometry import Geometry
from kvstore.keys import BlockRef
from kvstore.nvme import NvmeTier
from kvstore.store import KVStore
from schemas.blob import ElementType
from tests.kvstore.blocks import IDENTITY, TTL_S, chain, empty
from tests.kvstore.tier_contract import Clock

GEOMETRY = Geometry(4, 8, 48, ElementType.BFLOAT16)  # 98 kB a block
BLOCK_BYTES = GEOMETRY.payload_bytes(16) + 128
CAP_BYTES = 8_000_000


def payload_of(ref: BlockRef) -> memoryview:
    return memoryview(ref.key * (GEOMETRY.payload_bytes(16) // len(ref.key)))


def store_of(tier: NvmeTier, clock: Clock) -> KVStore:
    return KVStore([tier], IDENTITY, GEOMETRY, PLAIN, clock)


def used_in(root: Path) -> int:
    """All that lies in the folder, the counter and the tombstones too."""
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def save_all(store: KVStore, refs: list[BlockRef], clock: Clock, root: Path, most_bytes: int) -> int:
    """Saves chains of ten, each a job of its own, and checks after each block. Returns the number of blocks saved."""
    saved = 0
    for number, ref in enumerate(refs):
        if number % 10 == 0:
            clock.now += LEASE_S
        saved += store.save(ref, payload_of(ref), TTL_S)
        assert used_in(root) <= most_bytes
    return saved


@contextmanager
def probing(store: KVStore, refs: list[BlockRef]) -> Iterator[None]:
    """Somebody looks for blocks all the time."""
    stop = threading.Event()

    def probe() -> None:
        while not stop.wait(0.001):  # without a rest it would keep the interpreter from everybody else
            store.lookup(refs)

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("is_counter_kept", [True, False])
def test_the_cap_holds_with_6_mb_there_at_start_and_probes_all_the_time(
    small_disk: Path, is_counter_kept: bool
) -> None:
    root, clock = small_disk / "kv", Clock()
    there, new = chain(6_000_000 // BLOCK_BYTES), chain(120, first_id=10**6)
    with NvmeTier(root, CAP_BYTES, clock) as tier:
        assert save_all(store_of(tier, clock), there, clock, root, CAP_BYTES + BLOCK_BYTES) == len(there)
    if not is_counter_kept:
        (root / "usage").unlink()
    with NvmeTier(root, CAP_BYTES, clock) as tier:
        store = store_of(tier, clock)
        with probing(store, there + new):
            assert save_all(store, new, clock, root, CAP_BYTES + BLOCK_BYTES) == len(new)
        assert tier.counters.evicted >= len(there) + len(new) - CAP_BYTES // BLOCK_BYTES - 1
        into = empty(new[-1], GEOMETRY)
        assert store.load(new[-1], into) and into == payload_of(new[-1])
        assert store.lookup(there) < len(there)


def test_a_full_disk_is_relieved_and_every_block_stored(small_disk: Path) -> None:
    """The cap promises more than there is: ENOSPC, so others go, and the write is tried once more."""
    root, clock = small_disk / "kv", Clock()
    refs = chain(300)
    with NvmeTier(root, 10**9, clock) as tier:
        store = store_of(tier, clock)
        assert save_all(store, refs, clock, root, 10 * 2**20) == len(refs)
        assert tier.counters.evicted > 150
        assert store.load(refs[-1], empty(refs[-1], GEOMETRY))
        assert store.counters.write_errors == 0


def test_a_disk_full_of_other_things_costs_only_the_caching(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing of ours can go: one warning a minute, no block, and it is stored again once there is room."""
    root, clock = small_disk / "kv", Clock()
    with NvmeTier(root, CAP_BYTES, clock) as tier:
        store, refs = store_of(tier, clock), chain(20)
        ballast = small_disk / "ballast"
        ballast.write_bytes(bytes(10 * 2**20 - used_in(root) - 64 * 1024))
        with caplog.at_level(logging.WARNING):
            assert not any(store.save(ref, payload_of(ref), TTL_S) for ref in refs)
        assert len(caplog.records) == 1 and "No space left" in caplog.text
        assert store.counters.write_errors == len(refs)
        ballast.unlink()
        assert all(store.save(ref, payload_of(ref), TTL_S) for ref in refs)
        assert store.lookup(refs) == len(refs)
