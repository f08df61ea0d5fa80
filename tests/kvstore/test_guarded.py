"""The breaker of a tier: one failure is met, the rest is skipped, and it closes by itself."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvstore.guarded import GuardedTier
from kvstore.patience import Patience
from kvstore.redis.tier import RedisTier
from kvstore.store import KVStore
from kvstore.tier import BlobName, Life
from schemas.errors import KvRefused, KvSkipped, KvUnavailable
from tests.kvstore.blocks import GEOMETRY, IDENTITY, TTL_S, chain, empty, payload_of
from tests.kvstore.memory_tier import MemoryTier
from tests.kvstore.tier_contract import TierContract
from tests.kvstore.valkey import Valkey
from tests.kvstore.wrappers import MeteredTier

NAME = BlobName("default", bytes(32))
LIFE = Life(0.0, time.time() + TTL_S)
PROBE_INTERVAL_S = 0.01
DEADLINE_S = 10.0


class FailingTier(MeteredTier):
    """`error`: what every call raises. `write_error`: what writes raise."""

    def __init__(self) -> None:
        super().__init__(MemoryTier())
        self.error: KvUnavailable | None = None
        self.write_error: KvUnavailable | None = None
        self.probed = threading.Event()

    def before(self, method: str) -> None:
        super().before(method)
        if self.error is not None:
            raise self.error
        if method == "write" and self.write_error is not None:
            raise self.write_error

    def probe(self) -> None:
        self.probed.set()
        for error in (self.error, self.write_error):
            if error is not None:
                raise error


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture
def inner() -> FailingTier:
    return FailingTier()


@pytest.fixture
def tier(inner: FailingTier) -> Iterator[GuardedTier]:
    tier = GuardedTier(inner, PROBE_INTERVAL_S)
    yield tier
    tier.close()


class TestGuardedTier(TierContract):
    """Well, it is a tier like any other."""

    @pytest.fixture
    def tier(self, clock, tmp_path):
        return GuardedTier(MemoryTier(clock))  # type: ignore[arg-type]

    def plant(self, tier, name, blob):
        tier.inner.blobs[name] = (blob, Life(0.0, 2_000_000_000.0))

    def peek(self, tier, name):
        return tier.inner.blobs[name][0] if name in tier.inner.blobs else None


def test_one_failure_is_met_and_the_rest_is_skipped(inner: FailingTier, tier: GuardedTier) -> None:
    inner.error = KvUnavailable("it hangs")
    with pytest.raises(KvUnavailable, match="it hangs"):
        tier.present([NAME])
    for _ in range(50):
        with pytest.raises(KvSkipped, match="it hangs"):
            tier.read(NAME, [])
        with pytest.raises(KvSkipped):
            tier.write(NAME, [], LIFE)
    assert inner.calls == ["present"], "nobody else waited"
    assert (tier.counters.skipped_reads, tier.counters.skipped_writes) == (50, 50)
    assert tier.trouble == "it hangs"


def test_it_closes_by_itself_once_a_probe_works(inner: FailingTier, tier: GuardedTier) -> None:
    inner.error = KvUnavailable("away")
    with pytest.raises(KvUnavailable):
        tier.touch(NAME, LIFE)
    until(inner.probed.is_set)
    assert tier.trouble
    inner.error = None
    until(lambda: not tier.trouble)
    assert tier.present([NAME]) == 0
    inner.error = KvUnavailable("away again")
    with pytest.raises(KvUnavailable):
        tier.present([NAME])
    inner.error = None
    until(lambda: not tier.trouble)


def test_what_is_full_can_still_be_read(inner: FailingTier, tier: GuardedTier) -> None:
    tier.write(NAME, [memoryview(b"x")], LIFE)
    inner.write_error = KvRefused("full")
    with pytest.raises(KvRefused):
        tier.write(NAME, [], LIFE)
    with pytest.raises(KvSkipped):
        tier.write(NAME, [], LIFE)
    assert tier.present([NAME]) == 1 and tier.is_read and not tier.is_written
    inner.write_error = None
    until(lambda: tier.is_written)
    tier.write(NAME, [], LIFE)


def test_after_an_outage_what_came_back_full_is_read(inner: FailingTier, tier: GuardedTier) -> None:
    inner.error = KvUnavailable("away")
    with pytest.raises(KvUnavailable):
        tier.present([NAME])
    inner.error, inner.write_error = None, KvRefused("full")
    until(lambda: tier.is_read)
    assert not tier.is_written and tier.trouble == "full"


def test_a_refused_read_is_no_outage(inner: FailingTier, tier: GuardedTier) -> None:
    inner.error = KvRefused("moving")
    with pytest.raises(KvRefused):
        tier.present([NAME])
    assert not tier.trouble


def test_a_read_that_was_given_up_says_nothing_about_the_tier(inner: FailingTier, tier: GuardedTier) -> None:
    inner.error = KvUnavailable("too slow for this one")
    patience = Patience()
    patience.give_up()
    with pytest.raises(KvUnavailable):
        tier.read(NAME, [], patience)
    assert not tier.trouble


def test_a_frozen_server_costs_one_wait_and_comes_back(valkey: Valkey) -> None:
    """CASES 23: SIGSTOP. One timeout is met; nothing else waits, and the blocks of before are there again."""
    metered = MeteredTier(RedisTier(valkey.url, timeout_s=0.2))
    metered.probe = metered.inner.probe  # type: ignore[attr-defined]
    guarded = GuardedTier(metered, 0.05)  # type: ignore[arg-type]
    store = KVStore([guarded], IDENTITY, GEOMETRY)
    refs = chain(3)
    for ref in refs:
        assert store.save(ref, payload_of(ref), TTL_S)
    metered.calls.clear()
    valkey.freeze()
    try:
        for _ in range(20):
            assert store.lookup(refs) == 0
            assert not store.load(refs[0], empty(refs[0]))
            assert not store.save(refs[0], payload_of(refs[0]), TTL_S)
        assert metered.calls == ["present"]
        assert "did not answer within 0.2 s" in store.troubles[0]
        assert store.counters.read_errors == 1 and store.counters.write_errors == 0
    finally:
        valkey.thaw()
    until(lambda: not store.troubles)
    assert store.lookup(refs) == 3 and store.load(refs[2], empty(refs[2]))
    guarded.close()


def test_a_killed_server_comes_back_empty(tmp_path) -> None:
    """CASES 23: killed in the middle."""
    server = Valkey(tmp_path).start()
    guarded = GuardedTier(RedisTier(server.url, timeout_s=10.0), 0.05)
    store = KVStore([guarded], IDENTITY, GEOMETRY)
    (ref,) = chain(1)
    try:
        assert store.save(ref, payload_of(ref), TTL_S) and store.lookup([ref]) == 1
        server.kill()
        assert store.lookup([ref]) == 0 and store.troubles
        server.start()
        until(lambda: not store.troubles)
        assert store.lookup([ref]) == 0
        assert store.save(ref, payload_of(ref), TTL_S) and store.lookup([ref]) == 1
    finally:
        guarded.close()
        server.kill()
