"""Whoever can write to the store can make a digest that fits: what such a blob may do is be a miss."""

import os
import pickle
import resource
import struct
from pathlib import Path

import lz4.block
import pytest
from blake3 import blake3

from kvstore.codec import codec_named
from kvstore.keys import BlockRef
from kvstore.nvme import NvmeTier
from kvstore.store import KVStore
from tests.kvstore.blocks import GEOMETRY, IDENTITY, TTL_S, chain, empty, payload_of

PAYLOAD_BYTES = GEOMETRY.payload_bytes(16)


def header_of(ref: BlockRef, stored: bytes, **fields: tuple[int, str, int]) -> bytes:
    head = bytearray(struct.pack("<4s4B", b"KVRB", 1, 1, 0, 3) + b"tokenizr" + b"modelfpr" + b"arithmet")
    head += struct.pack("<4H2I", GEOMETRY.layers, GEOMETRY.heads, GEOMETRY.head_dim, 16, ref.start, len(stored))
    head += ref.token_hash + ref.key
    for offset, kind, value in fields.values():
        struct.pack_into(kind, head, offset, value)
    return bytes(head)


def sealed(ref: BlockRef, stored: bytes, **fields: tuple[int, str, int]) -> bytes:
    head = header_of(ref, stored, **fields)
    return head + blake3(head + stored).digest() + stored


class Marker:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return (os.mkdir, (str(self.path),))


REF = chain(2)[1]
BOMB = lz4.block.compress(bytes(200_000_000), store_size=False)[: PAYLOAD_BYTES - 8]
PLANE = PAYLOAD_BYTES // 2
ZEROS = lz4.block.compress(bytes(PLANE), store_size=False)


def planes(*parts: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


DAMAGE = {
    "a bomb": sealed(REF, planes(BOMB)),
    "a plane that says 4 GiB": sealed(REF, struct.pack("<I", 2**32 - 1) + b"x"),
    "one plane": sealed(REF, planes(ZEROS)),
    "three planes": sealed(REF, planes(ZEROS, ZEROS, ZEROS)),
    "codec none, too short": sealed(REF, bytes(100), codec=(5, "B", 0)),
    "codec 7": sealed(REF, planes(ZEROS, ZEROS), codec=(5, "B", 7)),
    "dtype 9": sealed(REF, planes(ZEROS, ZEROS), dtype=(7, "B", 9)),
    "quantisation 3": sealed(REF, planes(ZEROS, ZEROS), quantisation=(6, "B", 3)),
    "a later version": sealed(REF, planes(ZEROS, ZEROS), version=(4, "B", 2)),
    "65,535 layers": sealed(REF, planes(ZEROS, ZEROS), layers=(32, "<H", 65535)),
    "no tokens": sealed(REF, planes(ZEROS, ZEROS), tokens=(38, "<H", 0)),
    "2 GiB stored": sealed(REF, planes(ZEROS, ZEROS), size=(44, "<I", 2**31)),
    "one byte less stored": sealed(REF, planes(ZEROS, ZEROS), size=(44, "<I", len(planes(ZEROS, ZEROS)) - 1)),
    "another's key": sealed(REF, planes(ZEROS, ZEROS), key=(64, "<I", 0)),
    "empty file": b"",
    "zeros": bytes(1000),
    "100 MB": bytes(100_000_000),
}
MISMATCH = {
    "int8": sealed(REF, planes(ZEROS, ZEROS), quantisation=(6, "B", 1)),
    "float16": sealed(REF, planes(ZEROS, ZEROS), dtype=(7, "B", 2)),
    "float32": sealed(REF, planes(ZEROS, ZEROS), dtype=(7, "B", 1)),
    "a longer block": sealed(REF, planes(ZEROS, ZEROS), tokens=(38, "<H", 1024)),
    "more layers": sealed(REF, planes(ZEROS, ZEROS), layers=(32, "<H", 1024)),
    "position 0": sealed(REF, planes(ZEROS, ZEROS), position=(40, "<I", 0)),
    "other tokens": sealed(REF, planes(ZEROS, ZEROS), hash=(48, "<I", 0)),
    "another model": sealed(REF, planes(ZEROS, ZEROS), model=(16, "<I", 0)),
}


@pytest.fixture
def store(tmp_path: Path) -> KVStore:
    return KVStore([NvmeTier(tmp_path, 10**9)], IDENTITY, GEOMETRY, codec_named("lz4"))


def plant(store: KVStore, blob: bytes) -> Path:
    (tier,) = store.tiers
    assert isinstance(tier, NvmeTier)
    path = Path(tier.path(REF.name))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(blob)
    return path


def expect_miss_then_heal(store: KVStore) -> None:
    assert not store.load(REF, empty(REF))
    assert store.counters.misses == 1
    assert store.save(REF, payload_of(REF), TTL_S)
    into = empty(REF)
    assert store.load(REF, into) and into == payload_of(REF)


def test_the_tests_forge_well(store: KVStore) -> None:
    """The forger's blobs are believed when nothing is wrong with them: else the tests below would prove nothing."""
    plant(store, sealed(REF, planes(ZEROS, ZEROS)))
    assert store.load(REF, empty(REF))


@pytest.mark.parametrize("blob", DAMAGE.values(), ids=DAMAGE.keys())
def test_hostile_blobs_are_damage(store: KVStore, blob: bytes) -> None:
    path = plant(store, blob)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    expect_miss_then_heal(store)
    assert (store.counters.damaged, store.counters.mismatched) == (1, 0)
    assert store.snapshot()["nvme_quarantined"] == 1
    assert path.exists()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10_000  # kB


@pytest.mark.parametrize("blob", MISMATCH.values(), ids=MISMATCH.keys())
def test_hostile_blobs_of_other_blocks_are_mismatches(store: KVStore, blob: bytes) -> None:
    plant(store, blob)
    assert not store.load(REF, empty(REF))
    assert (store.counters.damaged, store.counters.mismatched) == (0, 1)


def test_a_pickle_is_damage_and_does_not_run(store: KVStore, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    payload = pickle.dumps(Marker(marker))
    for blob in (payload, payload + bytes(1000), sealed(REF, planes(payload, payload)), sealed(REF, payload)):
        plant(store, blob)
        assert not store.load(REF, empty(REF))
    assert store.counters.damaged == 4
    assert not marker.exists()


def test_a_link_a_folder_and_a_pipe_are_damage(store: KVStore, tmp_path: Path) -> None:
    """A pipe without a writer must not hang the reader either."""
    path = plant(store, sealed(REF, planes(ZEROS, ZEROS)))
    elsewhere = path.rename(tmp_path / "elsewhere")
    for make in (lambda: path.symlink_to(elsewhere), path.mkdir, lambda: os.mkfifo(path)):
        make()
        store.lookup([REF])
        assert not store.load(REF, empty(REF))
        assert not os.path.lexists(path)
    assert store.counters.damaged == 3
    assert elsewhere.exists()
