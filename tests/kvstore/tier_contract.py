"""What every tier must do: subclasses give a tier, a second one on the same blobs, and a way underneath both."""

import itertools
import random
import time
from abc import ABC, abstractmethod
from pathlib import Path

import pytest

from kvstore.codec import CODECS, codec_named
from kvstore.keys import BlockRef
from kvstore.store import KVStore
from kvstore.tier import BlobName, Life, Tier
from schemas.blob import HEADER_BYTES, Codec, Quantisation
from schemas.errors import InvalidRequest
from tests.kvstore.blocks import GEOMETRY, IDENTITY, TTL_S, chain, empty, payload_of, quantised

NAME = BlobName("default", bytes(range(32)))
OTHER = BlobName("default", bytes(range(1, 33)))
FORMS = list(itertools.product(Codec, Quantisation))


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now

    def life(self, ttl_s: float = TTL_S) -> Life:
        return Life(self.now, self.now + ttl_s)


def life_now() -> Life:
    """For tiers that go by the real clock: by it, a time of `Clock` may lie ahead, as a pin's does."""
    now = time.time()
    return Life(now, now + TTL_S)


def parts(*texts: bytes) -> list[memoryview]:
    return [memoryview(text) for text in texts]


def read(tier: Tier, name: BlobName, size: int = 1 << 16) -> bytes | None:
    buffer = memoryview(bytearray(size))
    found = tier.read(name, [buffer[:7], buffer[7:]])
    return None if found is None else bytes(buffer[:found])


class TierContract(ABC):
    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    @abstractmethod
    def tier(self, clock: Clock, tmp_path: Path) -> Tier: ...

    @abstractmethod
    def plant(self, tier: Tier, name: BlobName, blob: bytes) -> None:
        """Writes underneath the tier, keeping an existing blob's life."""

    @abstractmethod
    def peek(self, tier: Tier, name: BlobName) -> bytes | None:
        """Reads underneath the tier."""

    def pass_time(self, tier: Tier, clock: Clock, seconds: float) -> None:
        """For tiers that go by another clock than ours there is more to do."""
        clock.now += seconds

    def test_a_blob_comes_back_whole(self, tier: Tier, clock: Clock) -> None:
        blob = bytes(range(256)) * 3
        tier.write(NAME, parts(blob[:128], b"", blob[128:500], blob[500:]), clock.life())
        assert read(tier, NAME) == blob
        assert self.peek(tier, NAME) == blob

    def test_a_miss_is_none(self, tier: Tier) -> None:
        assert read(tier, NAME) is None
        assert tier.present([NAME]) == 0
        assert not tier.touch(NAME, Life(0, 0))
        tier.quarantine(NAME)

    def test_a_larger_blob_than_the_buffers_says_its_size(self, tier: Tier, clock: Clock) -> None:
        tier.write(NAME, parts(b"x" * 1000), clock.life())
        buffer = memoryview(bytearray(10))
        assert tier.read(NAME, [buffer]) == 1000
        assert bytes(buffer) == b"x" * 10

    def test_the_later_blob_replaces_the_earlier(self, tier: Tier, clock: Clock) -> None:
        tier.write(NAME, parts(b"old" * 100), clock.life())
        tier.write(NAME, parts(b"new" * 50), clock.life())
        assert read(tier, NAME) == b"new" * 50

    def test_present_counts_up_to_the_first_gap(self, tier: Tier, clock: Clock) -> None:
        names = [BlobName("default", bytes([i]) * 32) for i in range(5)]
        for name in (names[0], names[1], names[3], names[4]):
            tier.write(name, parts(b"x" * 200), clock.life())
        assert tier.present(names) == 2
        assert tier.present(names[3:]) == 2
        assert tier.present([]) == 0

    def test_a_blob_expires(self, tier: Tier, clock: Clock) -> None:
        tier.write(NAME, parts(b"x" * 200), clock.life(10))
        self.pass_time(tier, clock, 11)
        assert tier.present([NAME]) == 0
        assert read(tier, NAME) is None

    def test_a_touched_blob_lives_longer_and_never_shorter(self, tier: Tier, clock: Clock) -> None:
        tier.write(NAME, parts(b"x" * 200), clock.life(10))
        assert tier.touch(NAME, clock.life(100))
        assert tier.touch(NAME, clock.life(0))
        self.pass_time(tier, clock, 50)
        assert tier.present([NAME]) == 1
        assert read(tier, NAME) == b"x" * 200

    def test_quarantine_is_out_of_the_way_and_can_be_written_again(self, tier: Tier, clock: Clock) -> None:
        tier.write(NAME, parts(b"x" * 200), clock.life())
        tier.write(OTHER, parts(b"y" * 200), clock.life())
        tier.quarantine(NAME)
        tier.quarantine(NAME)
        assert tier.counters.quarantined == 1
        assert read(tier, NAME) is None
        tier.write(NAME, parts(b"z" * 200), clock.life())
        assert (read(tier, NAME), read(tier, OTHER)) == (b"z" * 200, b"y" * 200)

    def test_the_blobs_of_a_tenant_are_erased_and_nobody_elses(self, tier: Tier, clock: Clock) -> None:
        """Their bytes are counted, quarantined ones too; what is written afterwards is stored as ever."""
        names = [BlobName(tenant, bytes([i]) * 32) for tenant in ("acme", "acme-2", "acm") for i in range(4)]
        for name in names:
            tier.write(name, parts(b"x" * 200), clock.life())
        tier.quarantine(names[3])
        assert tier.erase("acme") in (600, 800), "a tier need not keep what it quarantines"
        assert [tier.present([name]) for name in names] == [0] * 4 + [1] * 8
        assert read(tier, names[0]) is None and self.peek(tier, names[0]) is None
        assert tier.erase("acme") == tier.erase("nobody") == 0
        tier.write(names[0], parts(b"y" * 200), clock.life())
        assert read(tier, names[0]) == b"y" * 200

    def test_a_tenant_that_is_no_slug_is_refused(self, tier: Tier, clock: Clock) -> None:
        tier.write(NAME, parts(b"x" * 200), clock.life())
        for tenant in ("", "*", "..", "a/b", "{default}", "default\n"):
            with pytest.raises(InvalidRequest):
                tier.erase(tenant)
        assert tier.present([NAME]) == 1

    # Damage, seen through a store

    @pytest.fixture(params=["none", "lz4", "zstd"])
    def store(self, request: pytest.FixtureRequest, tier: Tier, clock: Clock) -> KVStore:
        return KVStore([tier], IDENTITY, GEOMETRY, codec_named(request.param), clock)

    @pytest.fixture
    def ref(self, store: KVStore) -> BlockRef:
        """A stored block in the middle of a chain."""
        block = chain(3)[1]
        assert store.save(block, payload_of(block), TTL_S)
        return block

    def expect_damage(self, tier: Tier, store: KVStore, ref: BlockRef, blob: bytes) -> None:
        """`blob` under the key of `ref` is one counted miss, out of the way afterwards, and healed by a save."""
        self.plant(tier, ref.name, blob)
        damaged = store.counters.damaged
        assert not store.load(ref, empty(ref))
        assert store.counters.damaged == damaged + 1
        assert self.peek(tier, ref.name) is None

    def test_a_stored_block_loads(self, store: KVStore, ref: BlockRef) -> None:
        into = empty(ref)
        assert store.lookup([ref]) == 1
        assert store.load(ref, into)
        assert into == payload_of(ref)

    @pytest.mark.parametrize(("codec", "quantisation"), FORMS, ids=lambda part: part.name.lower())
    def test_every_flipped_bit_is_found(
        self, tier: Tier, clock: Clock, codec: Codec, quantisation: Quantisation
    ) -> None:
        """CASES 8: one at each of 2,000 random places, in header, values and scales."""
        identity, geometry = quantised(quantisation)
        store, ref = KVStore([tier], identity, geometry, CODECS[codec], clock), chain(3)[1]
        page, into = payload_of(ref), empty(ref)
        assert store.save(ref, page, TTL_S) and store.load(ref, into)
        sound = self.peek(tier, ref.name)
        assert sound is not None and tuple(sound[5:7]) == (codec, quantisation)
        rng = random.Random(17)
        for _ in range(2000):
            bit = rng.randrange(8 * len(sound))
            blob = bytearray(sound)
            blob[bit // 8] ^= 1 << bit % 8
            self.plant(tier, ref.name, bytes(blob))
            assert not store.load(ref, empty(ref)), f"bit {bit} flipped unnoticed"
        assert store.counters.damaged == 2000
        again = empty(ref)
        assert store.save(ref, page, TTL_S) and store.load(ref, again) and again == into

    def test_every_truncation_is_found(self, tier: Tier, store: KVStore, ref: BlockRef) -> None:
        sound = self.peek(tier, ref.name)
        assert sound is not None
        size = len(sound)
        header = range(HEADER_BYTES + 2)
        cuts = {*header, HEADER_BYTES + 4, size // 2, size - 100, size - 16, size - 4, size - 1}
        for cut in sorted(cuts):
            self.expect_damage(tier, store, ref, sound[:cut])

    def test_trailing_junk_is_found(self, tier: Tier, store: KVStore, ref: BlockRef) -> None:
        sound = self.peek(tier, ref.name)
        assert sound is not None
        for junk in (b"\0", b"KVRB", sound, b"x" * 1_000_000):
            self.expect_damage(tier, store, ref, sound + junk)

    def test_a_swapped_blob_is_found(self, tier: Tier, store: KVStore, ref: BlockRef) -> None:
        other = chain(1, first_id=500)[0]
        assert store.save(other, payload_of(other), TTL_S)
        mine, theirs = self.peek(tier, ref.name), self.peek(tier, other.name)
        assert mine is not None and theirs is not None
        self.expect_damage(tier, store, ref, theirs)
        self.expect_damage(tier, store, ref, mine[:HEADER_BYTES] + theirs[HEADER_BYTES:])
        self.expect_damage(tier, store, other, theirs[:HEADER_BYTES] + mine[HEADER_BYTES:])
        for block in (ref, other):
            into = empty(block)
            assert store.save(block, payload_of(block), TTL_S)
            assert store.load(block, into)
            assert into == payload_of(block)
