"""What lies in a Valkey, seen by an operator."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.codec import PLAIN
from kvstore.redis.inventory import RedisInventory
from kvstore.redis.tier import RedisTier, key_of
from kvstore.store import KVStore
from kvstore.verify import damage_of
from schemas.errors import SetupError
from services.kv.view import StoreView
from services.settings import Kv
from tests.kvstore.blocks import GEOMETRY, IDENTITY, TTL_S, payload_of, refs_of
from tests.kvstore.valkey import Valkey

REFS = {tenant: refs_of(range(48), tenant) for tenant in ("acme", "bolt")}
FIRST = REFS["acme"][0]


@pytest.fixture
def tier(valkey: Valkey) -> Iterator[RedisTier]:
    tier = RedisTier(valkey.url, timeout_s=10.0)
    store = KVStore([tier], IDENTITY, GEOMETRY, PLAIN)
    for refs in REFS.values():
        assert all(store.save(ref, payload_of(ref), TTL_S) for ref in refs)
    yield tier
    tier.close()


@pytest.fixture
def inventory(tier: RedisTier) -> RedisInventory:
    return RedisInventory(tier)


def test_everything_is_walked(inventory: RedisInventory) -> None:
    assert inventory.tenants() == ["acme", "bolt"]
    assert {entry.name for entry in inventory.walk()} == {ref.name for refs in REFS.values() for ref in refs}
    assert {entry.name for entry in inventory.walk("bolt")} == {ref.name for ref in REFS["bolt"]}
    assert list(inventory.walk("nobody")) == []


def test_an_entry_tells_of_its_blob(inventory: RedisInventory, valkey: Valkey) -> None:
    entry = inventory.find(FIRST.name)
    assert entry is not None and entry.header is not None
    assert (entry.header.key, entry.size) == (FIRST.key, valkey.client().strlen(key_of(FIRST.name)))
    assert entry.life.expires_at - entry.life.used_at == pytest.approx(TTL_S, abs=60.0)
    valkey.client().set(key_of(FIRST.name), b"no blob")
    entry = inventory.find(FIRST.name)
    assert entry is not None and entry.header is None and entry.life.expires_at == float("inf")
    valkey.client().delete(key_of(FIRST.name))
    assert inventory.find(FIRST.name) is None and list(inventory.pieces(FIRST.name)) == []


def test_damage_is_told_and_quarantined(inventory: RedisInventory, valkey: Valkey) -> None:
    assert damage_of(FIRST.name, inventory.pieces(FIRST.name)) == ""
    valkey.client().setrange(key_of(FIRST.name), 200, b"xyz")
    assert damage_of(FIRST.name, inventory.pieces(FIRST.name)) == "the digest does not fit the bytes"
    inventory.quarantine(FIRST.name)
    assert inventory.find(FIRST.name) is None
    (kept,) = inventory.quarantined()
    assert kept.key == FIRST.key
    found = inventory.tidy()
    assert (found.quarantined, found.num_bytes) == (1, kept.size)
    assert inventory.quarantined() == [] and inventory.tidy() == (0, 0, 0)


def test_large_blobs_come_in_pieces(inventory: RedisInventory, valkey: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.redis.inventory.PIECE_BYTES", 1000)
    pieces = list(inventory.pieces(FIRST.name))
    assert len(pieces) > 3 and b"".join(pieces) == valkey.client().get(key_of(FIRST.name))


def test_a_life_can_be_cut_and_a_blob_removed(inventory: RedisInventory, valkey: Valkey) -> None:
    entry = inventory.find(FIRST.name)
    assert entry is not None
    assert inventory.set_life(FIRST.name, entry.life._replace(expires_at=entry.life.expires_at - TTL_S / 2))
    assert 0 < valkey.client().pttl(key_of(FIRST.name)) <= 1000 * TTL_S / 2
    assert inventory.remove(FIRST.name) and not inventory.remove(FIRST.name)
    assert not inventory.set_life(FIRST.name, entry.life)


def test_the_operators_view_has_both_tiers(tier: RedisTier, valkey: Valkey, tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    view = StoreView.open(Kv(data_dir=str(tmp_path), redis_url=valkey.url))
    assert [one.name for one in view.tiers] == ["nvme", "redis"] and view.left_out == []
    assert {held.tier.name for held in view.named(FIRST.key.hex())} == {"redis"}
    view.close()


def test_a_server_that_is_away_is_left_out_and_named(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="no KV store"):
        StoreView.open(Kv(data_dir=str(tmp_path)))
    (tmp_path / "kv").mkdir()
    view = StoreView.open(Kv(data_dir=str(tmp_path), redis_url="redis://127.0.0.1:1"))
    assert [one.name for one in view.tiers] == ["nvme"]
    assert len(view.left_out) == 1 and "127.0.0.1:1" in view.left_out[0]
    view.close()
