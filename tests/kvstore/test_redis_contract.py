"""The contract of a tier, held by Valkey: one server, and a cluster of three."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from kvstore.redis.tier import RedisTier, key_of
from kvstore.tier import BlobName, Tier
from tests.kvstore.tier_contract import Clock, TierContract, parts
from tests.kvstore.valkey import Valkey, cluster

TIMEOUT_S = 10.0  # a busy machine is no fault


class RedisContract(TierContract):
    """Looks underneath through redis-py: `client` is told by subclasses."""

    @pytest.fixture
    def client(self) -> Any: ...

    @pytest.fixture(autouse=True)
    def _underneath(self, client: Any) -> None:
        self.client_ = client

    def plant(self, tier: Tier, name: BlobName, blob: bytes) -> None:
        self.client_.set(key_of(name), blob, keepttl=True)

    def peek(self, tier: Tier, name: BlobName) -> bytes | None:
        found: bytes | None = self.client_.get(key_of(name))
        return found

    def pass_time(self, tier: Tier, clock: Clock, seconds: float) -> None:
        """The server's clock cannot be set, so every life is cut instead."""
        super().pass_time(tier, clock, seconds)
        for key in self.client_.scan_iter("kvrelay:*"):
            left_ms = self.client_.pttl(key)
            self.client_.pexpire(key, max(0, int(left_ms - 1000 * seconds)))

    def test_every_blob_has_a_time_to_live(self, tier: Tier, clock: Clock) -> None:
        name = BlobName("default", bytes(32))
        tier.write(name, parts(b"x" * 200), clock.life(10))
        assert 0 < self.client_.pttl(key_of(name)) <= 10_000
        tier.write(name, parts(b"x" * 200), clock.life(-5))
        assert self.peek(tier, name) is None or self.client_.pttl(key_of(name)) <= 1

    def test_many_are_touched_in_one_go(self, tier: Tier, clock: Clock) -> None:
        assert isinstance(tier, RedisTier)
        names = [BlobName("default", bytes([i]) * 32) for i in range(40)]
        for name in names[::2]:
            tier.write(name, parts(b"x"), clock.life(10))
        lives = [clock.life(1000 + i) for i in range(40)]
        assert tier.touch_many(names, lives) == [i % 2 == 0 for i in range(40)]
        assert all(1_000_000 < self.client_.pttl(key_of(name)) + 2000 for name in names[::2])
        assert tier.touch_many([], []) == []

    def test_large_blobs_pass_whole(self, tier: Tier, clock: Clock) -> None:
        blob = bytes(range(256)) * 20_000
        name = BlobName("default", bytes(32))
        tier.write(name, parts(blob[:128], blob[128:]), clock.life())
        into = memoryview(bytearray(len(blob)))
        assert tier.read(name, [into[:128], into[128:]]) == len(blob)
        assert into == blob

    def test_who_is_erased_is_gone_and_nobody_else(self, tier: Tier, clock: Clock) -> None:
        assert isinstance(tier, RedisTier)
        mine = [BlobName("mine", bytes([i]) * 32) for i in range(50)]
        other = [BlobName("mine-too", bytes([i]) * 32) for i in range(50)]
        for name in (*mine, *other):
            tier.write(name, parts(b"x"), clock.life())
        assert set(tier.names("mine")) == set(mine)
        assert set(tier.names()) == {*mine, *other}
        assert tier.erase("mine") == 50
        assert (tier.present(mine), tier.present(other)) == (0, 50)

    def test_few_quarantined_blobs_are_kept(self, tier: Tier, clock: Clock) -> None:
        for number in range(40):
            name = BlobName("default", bytes([number]) * 32)
            tier.write(name, parts(b"damaged %d" % number), clock.life())
            tier.quarantine(name)
        kept = [key for key in self.client_.scan_iter("kvrelay:quarantine:*") if not key.endswith(b"last")]
        assert len(kept) == 16
        found = {self.client_.hget(key, "blob") for key in kept}
        assert found == {b"damaged %d" % number for number in range(24, 40)}
        assert all(self.client_.ttl(key) > 0 for key in kept)

    def test_another_type_under_the_name_is_damage(self, tier: Tier, clock: Clock) -> None:
        name = BlobName("default", bytes(32))
        self.client_.rpush(key_of(name), "a", "list")
        assert tier.read(name, [memoryview(bytearray(10_000))]) == 0
        tier.quarantine(name)
        assert tier.present([name]) == 0


class TestRedisTier(RedisContract):
    @pytest.fixture
    def client(self, valkey: Valkey) -> Any:
        return valkey.client()

    @pytest.fixture
    def tier(self, valkey: Valkey, clock: Clock, tmp_path: Path) -> Iterator[Tier]:
        tier = RedisTier(valkey.url, timeout_s=TIMEOUT_S, clock=clock)
        yield tier
        tier.close()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Valkey]]:
    with cluster(tmp_path_factory.mktemp("cluster")) as nodes:
        yield list(nodes)


class TestClusterTier(RedisContract):
    @pytest.fixture
    def client(self, nodes: list[Valkey]) -> Iterator[Any]:
        for node in nodes:
            node.client().flushall()
        client = redis.RedisCluster(host="127.0.0.1", port=nodes[0].port)
        yield client
        client.close()

    @pytest.fixture
    def tier(self, nodes: list[Valkey], clock: Clock, tmp_path: Path) -> Iterator[Tier]:
        tier = RedisTier(nodes[1].url, is_cluster=True, timeout_s=TIMEOUT_S, clock=clock)
        yield tier
        tier.close()

    def test_keys_are_spread_and_found_again_after_they_moved(
        self, tier: Tier, clock: Clock, nodes: list[Valkey]
    ) -> None:
        names = [BlobName("default", bytes([i]) * 32) for i in range(60)]
        for name in names:
            tier.write(name, parts(b"x" * 100), clock.life())
        assert all(node.client().dbsize() > 5 for node in nodes)
        assert tier.present(names) == 60
        slot = int(nodes[0].client().cluster("KEYSLOT", key_of(names[0]).decode()))
        old = next(i for i in range(3) if 16384 * i // 3 <= slot < 16384 * (i + 1) // 3)
        move_slot(nodes, slot, nodes[old], nodes[(old + 1) % 3])
        try:
            assert tier.present(names[1:]) == 59, "the others are where they were"
            assert tier.present(names) == 0, "what does not move with its slot is a miss"
            tier.write(names[0], parts(b"y" * 100), clock.life())
            assert tier.present(names) == 60
        finally:
            move_slot(nodes, slot, nodes[(old + 1) % 3], nodes[old])


def move_slot(nodes: list[Valkey], slot: int, source: Valkey, target: Valkey) -> None:
    """Without its keys, which are deleted."""
    for key in source.client().cluster("GETKEYSINSLOT", slot, 100):
        source.client().delete(key)
    owner = target.client().cluster("MYID")
    for node in (target, source, *nodes):
        node.client().execute_command("CLUSTER", "SETSLOT", slot, "NODE", owner)
