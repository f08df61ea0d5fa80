"""What lies in a folder of blocks, seen by an operator."""

import os
from pathlib import Path

import pytest

from kvstore.codec import codec_named
from kvstore.inventory import Inventory
from kvstore.keys import BlockRef
from kvstore.nvme import NvmeTier
from kvstore.nvme_inventory import NvmeInventory
from kvstore.store import KVStore
from kvstore.tier import BlobName, Life
from kvstore.verify import damage_of
from tests.kvstore.blocks import GEOMETRY, IDENTITY, TTL_S, payload_of, refs_of
from tests.kvstore.tier_contract import Clock


class Place:
    """A tier with 3 blocks of each of two tenants, and the inventory of the same folder."""

    def __init__(self, root: Path, clock: Clock) -> None:
        self.root, self.clock = root, clock
        self.tier = NvmeTier(root, 10**9, clock)
        self.inventory: Inventory = NvmeInventory(root)
        self.store = KVStore([self.tier], IDENTITY, GEOMETRY, codec_named("lz4"), clock)
        self.refs = {tenant: refs_of(range(48), tenant) for tenant in ("acme", "bolt")}
        for ref in self.all_refs():
            assert self.store.save(ref, payload_of(ref), TTL_S)

    def all_refs(self) -> list[BlockRef]:
        return [ref for refs in self.refs.values() for ref in refs]

    def names(self, tenant: str | None = None) -> set[BlobName]:
        return {entry.name for entry in self.inventory.walk(tenant)}

    def path(self, ref: BlockRef) -> Path:
        return Path(self.tier.path(ref.name))

    def damage(self, ref: BlockRef) -> str | None:
        return damage_of(ref.name, self.inventory.pieces(ref.name))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path, Clock())


def test_everything_is_walked(place: Place) -> None:
    assert place.names() == {ref.name for ref in place.all_refs()}
    assert place.names("bolt") == {ref.name for ref in place.refs["bolt"]}
    assert place.names("nobody") == set() and place.inventory.tenants() == ["acme", "bolt"]
    entry = place.inventory.find(place.refs["acme"][1].name)
    assert entry is not None and entry.header is not None
    assert (entry.header.position, entry.header.tokens, entry.size) == (
        16,
        16,
        place.path(place.refs["acme"][1]).stat().st_size,
    )
    assert entry.life.expires_at == pytest.approx(place.clock.now + TTL_S, abs=1e-3)
    assert entry.life.used_at == pytest.approx(place.clock.now, abs=0.1)


def test_what_is_no_block_is_passed_over_or_has_no_header(place: Place) -> None:
    folder = place.path(place.refs["acme"][0]).parent
    for name in ("notes.txt", "00.kvb", "A" * 64 + ".kvb", "g" * 64 + ".kvb"):
        (folder / name).write_bytes(b"x" * 300)
    key = bytes(32)
    junk = BlobName("acme", key)
    Path(place.tier.path(junk)).parent.mkdir(exist_ok=True)
    for content in (b"", b"KVRB", b"x" * 300, None):
        Path(place.tier.path(junk)).unlink(missing_ok=True)
        if content is None:
            Path(place.tier.path(junk)).symlink_to("/dev/zero")
        else:
            Path(place.tier.path(junk)).write_bytes(content)
        assert place.names() == {ref.name for ref in place.all_refs()} | {junk}
        entry = place.inventory.find(junk)
        assert entry is not None and entry.header is None
        if content is not None:
            assert damage_of(junk, place.inventory.pieces(junk))


def test_every_flipped_bit_and_cut_is_damage(place: Place) -> None:
    ref = place.refs["acme"][1]
    sound = place.path(ref).read_bytes()
    assert place.damage(ref) == ""
    for blob in [
        *(sound[:at] + bytes([sound[at] ^ 4]) + sound[at + 1 :] for at in range(0, len(sound), 37)),
        *(sound[:size] for size in (0, 1, 95, 127, 128, 129, len(sound) - 1)),
        sound + b"\0",
        place.path(place.refs["bolt"][1]).read_bytes(),
    ]:
        place.path(ref).write_bytes(blob)
        assert place.damage(ref), "unnoticed"
    place.path(ref).unlink()
    assert place.damage(ref) is None


def test_pieces_of_any_size_are_one_blob(place: Place) -> None:
    ref = place.refs["acme"][0]
    sound = place.path(ref).read_bytes()
    for size in (1, 7, 96, 127, 128, 129, 1000):
        assert damage_of(ref.name, (sound[at : at + size] for at in range(0, len(sound), size))) == ""


def test_quarantine_and_removal(place: Place) -> None:
    first, second, _ = place.refs["acme"]
    place.inventory.quarantine(first.name)
    place.inventory.quarantine(first.name)
    assert [blob.key for blob in place.inventory.quarantined()] == [first.key]
    assert place.inventory.remove(second.name) and not place.inventory.remove(second.name)
    assert place.inventory.find(first.name) is None
    assert len(place.names()) == 4


def test_tidying_takes_what_nobody_can_want(place: Place) -> None:
    damaged, *kept = place.refs["acme"]
    place.inventory.quarantine(damaged.name)
    (place.root / "tmp" / "dead.1-0.part").write_bytes(b"half a block")
    found = place.inventory.tidy()
    assert (found.quarantined, found.parts) == (1, 1) and found.num_bytes > 0
    assert place.inventory.tidy() == (0, 0, 0)
    assert place.names("acme") == {ref.name for ref in kept}
    assert place.store.save(damaged, payload_of(damaged), TTL_S), "the tier's own temporary files go on"


def test_a_life_can_be_cut(place: Place) -> None:
    name = place.refs["acme"][0].name
    assert place.store.renew(place.refs["acme"], 10 * TTL_S, used_at=place.clock.now + 500) == 3
    entry = place.inventory.find(name)
    assert entry is not None and entry.life[:2] == pytest.approx(
        (place.clock.now + 500, place.clock.now + 10 * TTL_S), abs=1e-3
    )
    assert place.inventory.set_life(name, place.clock.life(5))
    assert place.inventory.find(name).life[:2] == pytest.approx(place.clock.life(5)[:2], abs=1e-3)  # type: ignore[union-attr]
    os.unlink(place.tier.path(name))
    assert not place.inventory.set_life(name, place.clock.life())


def test_use_does_not_pull_a_block_back_from_the_future(place: Place) -> None:
    refs = place.refs["acme"]
    place.store.renew(refs, TTL_S, used_at=place.clock.now + 5000)
    place.clock.now += 10
    assert place.store.load(refs[0], memoryview(bytearray(payload_of(refs[0]))))
    place.store.renew(refs, TTL_S)
    entry = place.inventory.find(refs[0].name)
    assert entry is not None and entry.life.used_at == pytest.approx(place.clock.now - 10 + 5000, abs=1e-3)


def test_looking_at_a_block_is_no_use_of_it(place: Place) -> None:
    ref = place.refs["acme"][0]
    place.inventory.set_life(ref.name, Life(1.0, place.clock.now + 10**6))  # where the system itself would date a read
    assert place.damage(ref) == "" and list(place.inventory.walk())
    entry = place.inventory.find(ref.name)
    assert entry is not None and entry.life.used_at == 1.0


def test_blocks_used_in_the_future_outlive_all_others(tmp_path: Path) -> None:
    """Which is how a pin keeps them: eviction knows nothing of pins."""
    clock = Clock()
    place = Place(tmp_path / "kv", clock)
    pinned = place.refs["acme"]
    place.store.renew(pinned, 10**6, used_at=clock.now + 86_400)
    size = max(place.path(ref).stat().st_size for ref in place.all_refs())
    place.tier.close()
    tier = NvmeTier(tmp_path / "kv", 6 * size, clock)
    store = KVStore([tier], IDENTITY, GEOMETRY, codec_named("lz4"), clock)
    for first in range(100, 200):
        clock.now += 1
        for ref in refs_of(range(first, first + 16), "bolt"):
            assert store.save(ref, payload_of(ref), TTL_S)
    assert store.lookup(pinned) == 3
    assert tier.counters.evicted > 90
    tier.close()
