"""Several tiers: the fastest is asked first, and what only one has comes to the others beside the requests."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvstore.codec import codec_named
from kvstore.store import KVStore
from schemas.blob import HEADER_BYTES
from tests.kvstore.blocks import GEOMETRY, IDENTITY, TTL_S, chain, empty, payload_of
from tests.kvstore.memory_tier import MemoryTier
from tests.kvstore.wrappers import FaultyTier, MeteredTier

REFS = chain(4)


class Two:
    def __init__(self, copier: ThreadPoolExecutor | None = None) -> None:
        self.near, self.far = MeteredTier(MemoryTier()), MeteredTier(MemoryTier())
        self.copier = copier
        self.store = KVStore([self.near, self.far], IDENTITY, GEOMETRY, codec_named("lz4"), copier=copier)

    def only_far(self) -> None:
        """Stores `REFS`, and forgets them in the near tier."""
        for ref in REFS:
            assert self.store.save(ref, payload_of(ref), TTL_S)
        self.blobs(self.near).clear()
        self.near.calls.clear()
        self.far.calls.clear()

    def blobs(self, tier: MeteredTier) -> dict:
        assert isinstance(tier.inner, MemoryTier)
        return tier.inner.blobs

    def settle(self) -> None:
        assert self.copier is not None
        self.copier.submit(lambda: None).result(10)


@pytest.fixture
def copier() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def test_the_far_tier_is_not_asked_for_what_is_near() -> None:
    two = Two()
    for ref in REFS:
        two.store.save(ref, payload_of(ref), TTL_S)
    two.far.calls.clear()
    assert two.store.lookup(REFS) == len(REFS)
    assert all(two.store.load(ref, empty(ref)) for ref in REFS)
    assert [call for call in two.far.calls if call != "present"] == []


def test_a_block_that_only_the_far_tier_has_is_promoted_beside_the_requests(copier: ThreadPoolExecutor) -> None:
    two = Two(copier)
    two.only_far()
    into = empty(REFS[0])
    assert two.store.load(REFS[0], into) and into == payload_of(REFS[0])
    assert "write" not in two.near.calls, "not on the path of who waits for it"
    assert two.store.renew(REFS, TTL_S) == len(REFS)
    two.settle()
    assert [blob for blob, _ in map(two.blobs(two.near).get, two.blobs(two.far))] == [
        blob for blob, _ in two.blobs(two.far).values()
    ]
    assert two.store.counters.copied == len(REFS)
    two.far.calls.clear()
    assert all(two.store.load(ref, empty(ref)) for ref in REFS) and "read" not in two.far.calls


def test_the_far_tier_follows_the_near_one(copier: ThreadPoolExecutor) -> None:
    two = Two(copier)
    for ref in REFS:
        assert two.store.save(ref, payload_of(ref), TTL_S, everywhere=False)
        assert two.near.calls.count("write") == REFS.index(ref) + 1
    two.settle()
    assert two.blobs(two.near).keys() == two.blobs(two.far).keys()
    assert [blob for blob, _ in two.blobs(two.near).values()] == [blob for blob, _ in two.blobs(two.far).values()]


def test_a_broken_near_tier_is_stepped_over(copier: ThreadPoolExecutor) -> None:
    near, far = FaultyTier(MemoryTier(), "present", "read", "write", "touch"), MemoryTier()
    store = KVStore([near, far], IDENTITY, GEOMETRY, copier=copier)
    assert store.save(REFS[0], payload_of(REFS[0]), TTL_S, everywhere=False)
    assert len(far.blobs) == 1 and store.lookup(REFS[:1]) == 1
    into = empty(REFS[0])
    assert store.load(REFS[0], into) and into == payload_of(REFS[0])


def test_damage_is_never_copied(copier: ThreadPoolExecutor) -> None:
    two = Two(copier)
    two.only_far()
    blob, life = two.blobs(two.far)[REFS[1].name]
    two.blobs(two.far)[REFS[1].name] = (blob[:-1] + bytes([blob[-1] ^ 1]), life)
    other, _ = two.blobs(two.far)[REFS[3].name]
    two.blobs(two.far)[REFS[2].name] = (other, life)
    two.store.renew(REFS, TTL_S)
    two.settle()
    assert set(two.blobs(two.near)) == {REFS[0].name, REFS[3].name}
    assert two.store.counters.damaged == 2 and REFS[1].name not in two.blobs(two.far)


def test_copies_that_pile_up_are_dropped_and_counted(
    copier: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.backlog.MAX_WAITING", 2)
    two = Two(copier)
    two.only_far()
    begun = copier.submit(lambda: None)
    begun.result(10)
    gate = threading.Event()
    copier.submit(gate.wait, 10)
    two.store.renew(REFS, TTL_S)
    gate.set()
    two.settle()
    assert len(two.blobs(two.near)) == 2 and two.store.counters.copies_dropped == 2
    two.store.renew(REFS, TTL_S)
    two.settle()
    assert len(two.blobs(two.near)) == 4, "the next use brings the others"


def test_a_mixed_chain_is_found_whole() -> None:
    two = Two()
    for number, ref in enumerate(REFS):
        assert two.store.save(ref, payload_of(ref), TTL_S)
        del two.blobs(two.near if number % 2 else two.far)[ref.name]
    assert two.store.lookup(REFS) == len(REFS)
    assert all(len(blob) > HEADER_BYTES for blob, _ in two.blobs(two.near).values())


def test_a_block_that_somebody_waits_for_is_compressed_later(copier: ThreadPoolExecutor) -> None:
    """In every tier; the codec is none of the path of the request."""
    gate = threading.Event()
    two = Two(copier)
    copier.submit(gate.wait, 10)
    assert two.store.save(REFS[0], payload_of(REFS[0]), TTL_S, everywhere=False, quickly=True)
    assert two.store.save(REFS[1], payload_of(REFS[1]), TTL_S, everywhere=True, quickly=True)
    plain_bytes = GEOMETRY.payload_bytes(REFS[0].num_tokens) + HEADER_BYTES
    assert [len(blob) for blob, _ in two.blobs(two.near).values()] == [plain_bytes] * 2
    gate.set()
    two.settle()
    for tier in (two.near, two.far):
        assert all(len(blob) < plain_bytes for blob, _ in two.blobs(tier).values()) and len(two.blobs(tier)) == 2
    for ref in REFS[:2]:
        into = empty(ref)
        assert two.store.load(ref, into) and into == payload_of(ref)


def test_what_does_not_compress_is_written_once(copier: ThreadPoolExecutor) -> None:
    two = Two(copier)
    noise = memoryview(np.random.default_rng(1).bytes(GEOMETRY.payload_bytes(REFS[0].num_tokens)))
    assert two.store.save(REFS[0], noise, TTL_S, everywhere=False, quickly=True)
    two.settle()
    assert two.near.calls.count("write") == 1 == two.far.calls.count("write")
