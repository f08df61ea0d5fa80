"""The order of eviction: by itself, as the simulator plays it, and as chains of blocks in a folder live through it."""

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.codec import PLAIN
from kvstore.eviction import LEASE_S, SLOWER, eviction_order
from kvstore.geometry import Geometry
from kvstore.keys import BlockRef
from kvstore.nvme import NvmeTier
from kvstore.store import KVStore
from kvstore.tier import BlobName
from schemas.blob import HEADER_BYTES, ElementType
from services.bench.eviction import Ours
from tests.kvstore.blocks import BLOCK_TOKENS, IDENTITY, empty, refs_of
from tests.kvstore.tier_contract import Clock

NOW_NS = 10**18
S = 10**9


def order(blocks: list[tuple[float, bool]]) -> list[int]:
    """`blocks`: seconds since the last use, and whether reused."""
    used_ns = np.array([NOW_NS - int(age_s * S) for age_s, _ in blocks], np.int64)
    return eviction_order(used_ns, np.array([again for _, again in blocks], np.bool_), NOW_NS).tolist()


def test_the_oldest_goes_first_and_a_reused_block_ages_more_slowly() -> None:
    assert SLOWER == 5
    assert order([(100, False), (200, True), (300, False), (400, True), (1600, True)]) == [4, 2, 0, 3, 1]


def test_leased_blocks_go_only_when_all_are_leased() -> None:
    assert order([(LEASE_S - 1, False), (900, True), (LEASE_S + 1, False)]) == [1, 2]
    assert order([(LEASE_S - 1, False), (1, False), (LEASE_S - 2, True)]) == [0, 2, 1]


ages = st.tuples(st.floats(0, 100), st.booleans(), st.floats(0, 50), st.booleans())


@settings(deadline=None)
@given(st.lists(ages, min_size=1, max_size=30))
def test_a_block_used_no_later_and_reused_no_more_than_another_goes_first(
    pairs: list[tuple[float, bool, float, bool]],
) -> None:
    """Descendant and ancestor: the ancestor is at least as recently used, and reused if the descendant is."""
    blocks = []
    for age_s, reused, older_s, never in pairs:
        blocks += [(age_s + older_s + 0.001, reused and not never), (age_s, reused)]
    places = {index: place for place, index in enumerate(order(blocks))}
    never = len(blocks)
    assert all(places.get(2 * i, never) <= places.get(2 * i + 1, never) for i in range(len(pairs)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4), st.integers(0, 30)), max_size=60), st.integers(4, 12))
def test_the_simulator_evicts_what_we_evict(jobs: list[tuple[int, int, int]], num_blocks: int) -> None:
    """A job uses a run of blocks some seconds after the last one; whatever goes, both say which is next."""
    ours, now_s = Ours(num_blocks, max_tombstones=8), 1000.0
    evict = ours.evict

    def checked_evict(at_s: float) -> int:
        blocks = [*ours.once.items(), *ours.reused.items()]
        # Blocks of one job are told apart by their depth: the later one went in first.
        used_ns = np.array([int(used_s * S) + place for place, (_, used_s) in enumerate(blocks)], np.int64)
        reused = np.array([block in ours.reused for block, _ in blocks], np.bool_)
        expected = blocks[eviction_order(used_ns, reused, int(at_s * S))[0]][0]
        victim = evict(at_s)
        assert victim == expected
        return victim

    ours.evict = checked_evict  # type: ignore[method-assign]
    for first, length, pause_s in jobs:
        now_s += pause_s
        ours.use(range(first, first + length), now_s)


GEOMETRY = Geometry(1, 1, 8, ElementType.BFLOAT16)
BLOCK_BYTES = HEADER_BYTES + 2 * 8 * 2 * BLOCK_TOKENS
CAP_BLOCKS = 14

# A chat is one of two system prompts and up to four turns, some of which several chats share.
chats = st.tuples(st.integers(0, 1), st.lists(st.integers(0, 2), max_size=4))


def chain_of(chat: tuple[int, list[int]]) -> list[BlockRef]:
    system, turns = chat
    ids = [system] * (2 * BLOCK_TOKENS)
    for turn in turns:
        ids += [10 + turn] * (2 * BLOCK_TOKENS)
    return refs_of(ids)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(chats, st.sampled_from([0.0, 1.0, LEASE_S + 1])), min_size=5, max_size=30))
def test_ancestors_outlive_descendants(jobs: list[tuple[tuple[int, list[int]], float]]) -> None:
    """CASES 9. While what jobs in flight use fits under the cap, no block is there without its ancestors."""
    clock = Clock()
    used: dict[BlobName, float] = {}
    with tempfile.TemporaryDirectory() as folder, NvmeTier(Path(folder), CAP_BLOCKS * BLOCK_BYTES, clock) as tier:
        store = KVStore([tier], IDENTITY, GEOMETRY, PLAIN, clock)
        chains = []
        for chat, pause_s in jobs:
            refs = chain_of(chat)
            clock.now += pause_s
            in_flight = {name for name, at in used.items() if at > clock.now - LEASE_S}
            if len(in_flight.union(ref.name for ref in refs)) > CAP_BLOCKS:
                clock.now += LEASE_S + 1
            chains.append(refs)
            use(store, refs, clock.now)
            used |= {ref.name: clock.now for ref in refs}
            for chain in chains:
                there = [tier.present([ref.name]) for ref in chain]
                assert there == sorted(there, reverse=True), "a hole"
            assert tier.present([ref.name for ref in refs]) == len(refs)
            assert sum(tier.present([name]) for name in used) <= CAP_BLOCKS


def use(store: KVStore, refs: list[BlockRef], used_at: float) -> None:
    """As a job does: what is there is renewed, what is missing written, all dated by one time."""
    num_stored = store.lookup(refs)
    store.renew(refs[:num_stored], 10**6, used_at=used_at, reused=True)
    for ref in refs[num_stored:]:
        assert store.save(ref, empty(ref, GEOMETRY), 10**6, used_at=used_at)
