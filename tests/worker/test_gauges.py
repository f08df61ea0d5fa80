"""What a worker's metrics say of its store."""

from collections.abc import Iterator

import pytest

from kvstore.guarded import GuardedTier
from kvstore.store import KVStore
from schemas.errors import KvRefused, KvUnavailable
from services import config, telemetry
from services.worker.gauges import StoreGauges
from tests.kvstore.blocks import GEOMETRY, IDENTITY, TTL_S, chain, payload_of
from tests.kvstore.test_guarded import FailingTier


@pytest.fixture(autouse=True)
def metrics() -> Iterator[None]:
    telemetry.configure("prefill", "prefill-1", config.Settings())
    yield
    telemetry.shutdown()


def page() -> list[str]:
    return telemetry.scrape().decode("utf-8").splitlines()


def test_a_tier_that_is_left_alone_shows() -> None:
    inner = FailingTier()
    tier = GuardedTier(inner, probe_interval_s=60.0)
    store = KVStore([tier], IDENTITY, GEOMETRY)
    gauges = StoreGauges(store)
    (ref,) = chain(1)
    assert store.save(ref, payload_of(ref), TTL_S)
    gauges.tell()
    assert 'kvrelay_tier_open{tier="memory",way="read"} 0.0' in page()
    inner.write_error = KvRefused("full")
    assert not store.save(chain(1, 100)[0], payload_of(ref), TTL_S)
    assert 'kvrelay_tier_open{tier="memory",way="read"} 0.0' in page()
    assert 'kvrelay_tier_open{tier="memory",way="write"} 1.0' in page()
    inner.error = KvUnavailable("away")
    for _ in range(4):
        assert store.lookup([ref]) == 0
    assert not store.save(ref, payload_of(ref), TTL_S)
    gauges.tell()
    gauges.tell()
    assert 'kvrelay_tier_open{tier="memory",way="read"} 1.0' in page()
    assert 'kvrelay_skipped_reads_total{tier="memory"} 4.0' in page()
    assert 'kvrelay_skipped_writes_total{tier="memory"} 1.0' in page()
    tier.close()
