import logging
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import keys
from kvstore.blob import BlobFormat
from kvstore.codec import CODECS, PLAIN, BlockCodec, codec_named
from kvstore.geometry import Geometry
from kvstore.keys import BlockRef, Identity
from kvstore.nvme import NvmeTier
from kvstore.store import KVStore
from schemas.blob import ElementType
from schemas.errors import SetupError
from tests.kvstore.blocks import BLOCK_TOKENS, GEOMETRY, IDENTITY, TTL_S, chain, empty, kv_like, payload_of, refs_of
from tests.kvstore.memory_tier import MemoryTier
from tests.kvstore.tier_contract import Clock
from tests.kvstore.wrappers import FaultyTier, MeteredTier

LZ4 = codec_named("lz4")


def store_of(*tiers: object, codec: BlockCodec = LZ4, **kwargs: object) -> KVStore:
    return KVStore(tiers, IDENTITY, GEOMETRY, codec, **kwargs)  # type: ignore[arg-type]


def fill(store: KVStore, refs: list[BlockRef]) -> None:
    for ref in refs:
        assert store.save(ref, payload_of(ref), TTL_S)


@settings(max_examples=40, deadline=None)
@given(
    st.builds(Geometry, st.integers(1, 3), st.integers(1, 3), st.sampled_from([8, 64]), st.sampled_from(ElementType)),
    st.integers(1, 80),
    st.sampled_from([16, 32, 64]),
    st.sampled_from(list(CODECS.values())),
)
def test_what_is_saved_is_loaded(geometry: Geometry, num_tokens: int, block_tokens: int, codec: BlockCodec) -> None:
    """Over shapes, types, block sizes and partial last blocks; by another process's store on the same tier."""
    identity = Identity(
        fingerprint=b"modelfpr",
        tokenizer_hash=b"tokenizr",
        arithmetic=b"arithmet",
        dtype=geometry.dtype,
        block_tokens=block_tokens,
    )
    tier = MemoryTier()
    writer, reader = (KVStore([tier], identity, geometry, codec) for _ in range(2))
    refs = refs_of(range(num_tokens), identity=identity)
    for ref in refs:
        assert writer.save(ref, payload_of(ref, geometry), TTL_S)
    assert reader.lookup(refs) == len(refs)
    for ref in refs:
        into = empty(ref, geometry)
        assert reader.load(ref, into)
        assert into == payload_of(ref, geometry)


def test_codecs_read_each_others_blocks() -> None:
    tier, ref = MemoryTier(), chain(1)[0]
    for writer, reader in ((LZ4, PLAIN), (PLAIN, LZ4)):
        tier.blobs.clear()
        fill(store_of(tier, codec=writer), [ref])
        assert store_of(tier, codec=reader).load(ref, empty(ref))


def test_a_codec_that_does_not_pay_is_skipped_block_by_block() -> None:
    tier, (ref, other) = MemoryTier(), chain(2)
    store = store_of(tier)
    noise = memoryview(random.Random(1).randbytes(GEOMETRY.payload_bytes(BLOCK_TOKENS)))
    assert store.save(ref, noise, TTL_S) and store.save(other, payload_of(other), TTL_S)
    assert [tier.blobs[block.name][0][5] for block in (ref, other)] == [0, 1]
    into = empty(ref)
    assert store.load(ref, into) and into == noise


@pytest.mark.parametrize(("missing", "run"), [(0, 0), (2, 2), (5, 5)])
def test_only_the_unbroken_run_counts(missing: int, run: int) -> None:
    tier, refs = MemoryTier(), chain(6)
    store = store_of(tier)
    fill(store, refs)
    tier.quarantine(refs[missing].name)
    assert store.lookup(refs) == run


def test_tiers_complete_each_others_runs() -> None:
    refs, fast, slow = chain(5), MemoryTier(), MemoryTier()
    fill(store_of(fast), [refs[0], refs[2]])
    fill(store_of(slow), [refs[1], refs[3]])
    assert store_of(fast, slow).lookup(refs) == 4


def test_a_forced_collision_is_a_miss_and_both_answers_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "block_key", lambda parent, ids: bytes(32))
    mine, theirs = refs_of(range(16))[0], refs_of(range(100, 116))[0]
    assert mine.key == theirs.key
    store = store_of(MemoryTier())
    fill(store, [mine])
    assert store.lookup([theirs]) == 1
    assert not store.load(theirs, empty(theirs))
    assert (store.counters.mismatched, store.counters.misses, store.counters.damaged) == (1, 1, 0)
    into = empty(mine)
    assert store.load(mine, into) and into == kv_like(GEOMETRY, 16, seed=0)
    fill(store, [theirs])  # a block that is not ours does not keep ours out
    assert store.load(theirs, empty(theirs))


def test_two_blocks_of_one_chain_that_collide_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "block_key", lambda parent, ids: bytes(32))
    first, second = chain(2)
    store = store_of(MemoryTier())
    fill(store, [first])
    assert not store.load(second, empty(second))
    assert store.counters.mismatched == 1


OTHERS = [
    {"fingerprint": b"othermdl"},
    {"tokenizer_hash": b"othertok"},
    {"arithmetic": b"otherari"},
    {"dtype": ElementType.FLOAT16},
]


@pytest.mark.parametrize("change", OTHERS, ids=str)
def test_anothers_block_under_our_key_is_a_counted_miss_with_one_warning(
    change: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    """float16 and bfloat16 blocks have one size: nothing but the header tells them apart."""
    other = Identity(**{name: getattr(IDENTITY, name) for name in IDENTITY.__struct_fields__} | change)
    geometry = Geometry(GEOMETRY.layers, GEOMETRY.heads, GEOMETRY.head_dim, other.dtype)
    tier, ref = MemoryTier(), chain(1)[0]
    assert KVStore([tier], other, geometry).save(ref, payload_of(ref, geometry), TTL_S)
    store = store_of(tier)
    for _ in range(3):
        assert not store.load(ref, empty(ref))
    assert store.counters.mismatched == 3
    assert tier.counters.quarantined == 0
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert next(iter(change)) in warnings[0]


@pytest.mark.parametrize("shape", [(1, 6, 16), (2, 6, 8), (4, 3, 8), (2, 3, 8), (6, 2, 8)])
def test_a_block_of_another_shape_is_a_miss(shape: tuple[int, int, int]) -> None:
    """Most of these have exactly the bytes of ours."""
    tier, ref = MemoryTier(), chain(1)[0]
    geometry = Geometry(*shape, GEOMETRY.dtype)
    assert KVStore([tier], IDENTITY, geometry, PLAIN).save(ref, payload_of(ref, geometry), TTL_S)
    store = store_of(tier)
    assert not store.load(ref, empty(ref))
    assert store.counters.mismatched == 1


def test_blocks_at_another_position_or_of_another_length_are_a_miss() -> None:
    tier, ref = MemoryTier(), chain(2)[1]
    store = store_of(tier)
    fill(store, [ref])
    for start, num_tokens in ((0, 16), (17, 16), (16, 15)):
        wrong = BlockRef(ref.tenant, ref.key, ref.token_hash, start, num_tokens)
        assert not store.load(wrong, empty(wrong))
    assert store.counters.hits == 0


def test_a_block_that_is_there_is_not_written_again_but_lives_longer() -> None:
    clock = Clock()
    tier, ref = MeteredTier(MemoryTier(clock)), chain(1)[0]
    store = store_of(tier, clock=clock)
    fill(store, [ref])
    clock.now += TTL_S - 1
    fill(store, [ref])
    assert tier.calls.count("write") == 1
    assert (store.counters.writes, store.counters.kept) == (1, 1)
    clock.now += TTL_S - 1
    assert store.load(ref, empty(ref))


def test_renewed_blocks_outlive_the_others() -> None:
    clock, refs = Clock(), chain(4)
    store = store_of(MemoryTier(clock), clock=clock)
    fill(store, refs[:3])
    assert store.renew(refs[:2], 2 * TTL_S) == 2
    assert store.renew(refs[3:], 2 * TTL_S) == 0
    clock.now += TTL_S + 1
    assert store.lookup(refs) == 2


def test_a_torn_or_foreign_block_in_the_way_is_written_again() -> None:
    tier, (ref, other) = MemoryTier(), chain(2)
    store = store_of(tier)
    fill(store, [ref, other])
    sound, foreign = tier.blobs[ref.name][0], tier.blobs[other.name][0]
    for torn in (b"", sound[:50], sound[:-1], bytes(len(sound)), sound + b"x", foreign):
        tier.blobs[ref.name] = (torn, tier.blobs[ref.name][1])
        fill(store, [ref])
        assert tier.blobs[ref.name][0] == sound


def test_a_damaged_tier_is_passed_over_for_a_sound_one() -> None:
    fast, slow, ref = MemoryTier(), MemoryTier(), chain(1)[0]
    store = store_of(fast, slow)
    fill(store, [ref])
    fast.blobs[ref.name] = (bytes(200), fast.blobs[ref.name][1])
    into = empty(ref)
    assert store.load(ref, into) and into == payload_of(ref)
    assert (store.counters.hits, store.counters.damaged, store.counters.misses) == (1, 1, 0)


def test_an_outage_is_counted_logged_once_and_never_raised(caplog: pytest.LogCaptureFixture) -> None:
    tier, refs = FaultyTier(MemoryTier()), chain(3)
    store = store_of(tier)
    fill(store, refs)
    tier.broken = {"present", "read", "write", "touch", "quarantine"}
    for _ in range(10):
        assert store.lookup(refs) == 0
        assert not store.load(refs[0], empty(refs[0]))
        assert not store.save(refs[0], payload_of(refs[0]), TTL_S)
        assert store.renew(refs, TTL_S) == 0
    assert store.counters.write_errors == 10
    assert store.counters.read_errors >= 20
    assert len([record for record in caplog.records if "write" in record.message]) == 1
    assert len(caplog.records) <= 3
    tier.broken = set()
    assert store.lookup(refs) == 3 and store.load(refs[0], empty(refs[0]))


def test_one_tier_out_of_reach_does_not_lose_the_other() -> None:
    down, up, refs = FaultyTier(MemoryTier(), "present", "read", "write", "touch"), MemoryTier(), chain(2)
    store = store_of(down, up)
    fill(store, refs)
    assert store.lookup(refs) == 2
    assert store.load(refs[1], empty(refs[1]))


def test_damage_that_cannot_be_moved_away_is_still_a_miss() -> None:
    tier, ref = FaultyTier(MemoryTier(), "quarantine"), chain(1)[0]
    store = store_of(tier)
    fill(store, [ref])
    tier.inner.blobs[ref.name] = (bytes(300), tier.inner.blobs[ref.name][1])  # type: ignore[attr-defined]
    for _ in range(2):
        assert not store.load(ref, empty(ref))
    assert store.counters.damaged == 2


def test_buffers_of_the_wrong_size_are_the_callers_fault() -> None:
    store, ref = store_of(MemoryTier()), chain(1)[0]
    with pytest.raises(ValueError, match="bytes, got 7"):
        store.load(ref, memoryview(bytearray(7)))
    with pytest.raises(ValueError, match="bytes, got 7"):
        store.save(ref, memoryview(bytes(7)), TTL_S)


def test_contradictions_stop_the_start() -> None:
    with pytest.raises(SetupError, match="FLOAT32"):
        BlobFormat(IDENTITY, Geometry(2, 3, 16, ElementType.FLOAT32), PLAIN)
    with pytest.raises(SetupError, match="block_tokens"):
        BlobFormat(IDENTITY, Geometry(1024, 1024, 1024, ElementType.BFLOAT16), PLAIN)
    with pytest.raises(SetupError, match="layers"):
        Geometry(0, 3, 16, ElementType.FLOAT32)


def test_the_snapshot_holds_what_happened(tmp_path: Path) -> None:
    tier, refs = NvmeTier(tmp_path, 10**8), chain(2)
    store = store_of(tier)
    fill(store, refs[:1])
    store.load(refs[0], empty(refs[0]))
    store.load(refs[1], empty(refs[1]))
    found = store.snapshot()
    assert (found["hits"], found["misses"], found["writes"], found["nvme_quarantined"]) == (1, 1, 1, 0)
    assert found["payload_bytes"] > found["stored_bytes"] == found["read_bytes"] > 0
    tier.close()


def test_a_tier_may_keep_blocks_for_less_long_than_was_asked() -> None:
    clock = Clock()
    short, long = MemoryTier(clock, max_ttl_s=10), MemoryTier(clock)
    store, (ref,) = store_of(short, long, clock=clock), chain(1)
    fill(store, [ref])
    assert store.renew([ref], 2 * TTL_S) == 1
    assert [tier.blobs[ref.name][1].expires_at - clock.now for tier in (short, long)] == [10, 2 * TTL_S]
    clock.now += 11
    assert (short.present([ref.name]), long.present([ref.name])) == (0, 1)
