"""Blobs whose digest fits and whose payload lies: a counted miss, and no memory beyond the block's own size."""

import re
import struct
from functools import cache
from pathlib import Path

import lz4.block
import numpy as np
import pytest
import zstandard

from kvstore.codec import CODECS
from kvstore.geometry import Geometry
from kvstore.keys import BlockRef
from kvstore.store import KVStore
from schemas.blob import Codec, Quantisation
from tests.kvstore.blocks import BLOCK_TOKENS, TTL_S, chain, empty, payload_of, quantised
from tests.kvstore.forge import forged, plane_sizes, planes
from tests.kvstore.memory_tier import MemoryTier
from tests.kvstore.tier_contract import Clock, Life

REF: BlockRef = chain(2)[1]
BOMB_BYTES = 300_000_000
MOST_BYTES = 4_000_000  # what the interpreter itself may take on the way


class Peak:
    """How far resident memory rose above where it was, by Linux's own high-water mark."""

    def __init__(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_bytes(b"5")
        except OSError:
            pytest.skip("needs a resettable high-water mark")
        self._before = self._high_water()

    @property
    def growth_bytes(self) -> int:
        return self._high_water() - self._before

    def _high_water(self) -> int:
        found = re.search(rb"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_bytes())
        assert found
        return 1024 * int(found[1])


def zstd_of(data: bytes, **parameters: int) -> bytes:
    parameters = zstandard.ZstdCompressionParameters.from_level(1, **parameters)  # type: ignore[assignment]
    return zstandard.ZstdCompressor(compression_params=parameters).compress(data)  # type: ignore[arg-type]


@cache
def zstd_bombs(size: int) -> dict[str, bytes]:
    """Frames for a plane of `size` bytes."""
    zeros = bytes(size)
    long = long_frame(True)
    unknown = long_frame(False)
    honest = zstd_of(zeros)
    return {
        "a frame of 300 MB": long,
        "300 MB without a size": unknown,
        "a size of 2**63": b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 2**63) + honest[-8:],
        "a window of 2 GiB": wide_window(zeros),
        "two frames": honest + honest,
        "a frame and junk": honest + b"junk",
        "a skippable frame": b"\x50\x2a\x4d\x18" + struct.pack("<I", 2**31),
        "cut by a byte": honest[:-1],
        "a byte short": zstd_of(zeros[:-1]),
        "a byte long": zstd_of(zeros + b"\0"),
        "a size that lies": lying_size(zeros),
        "only magic": honest[:4],
        "wants a dictionary": honest[:4] + bytes([honest[4] | 1, 77]) + honest[5:],
    }


@cache
def long_frame(says_its_size: bool) -> bytes:
    return zstandard.ZstdCompressor(level=1, write_content_size=says_its_size).compress(bytes(BOMB_BYTES))


def wide_window(data: bytes) -> bytes:
    """The right size in a frame that wants 2 GiB to remember."""
    body = zstd_of(data)
    header = zstandard.frame_header_size(body)
    return b"\x28\xb5\x2f\xfd\x80" + bytes([21 << 3]) + struct.pack("<I", len(data)) + body[header:]


def lying_size(data: bytes) -> bytes:
    """The header says what is expected, and the blocks hold 300 MB."""
    body = long_frame(True)
    header = zstandard.frame_header_size(body)
    return b"\x28\xb5\x2f\xfd\x80" + bytes([11 << 3]) + struct.pack("<I", len(data)) + body[header:]


@cache
def long_lz4() -> bytes:
    return lz4.block.compress(bytes(BOMB_BYTES), store_size=False)


@cache
def lz4_bombs(size: int) -> dict[str, bytes]:
    honest = lz4.block.compress(bytes(size), store_size=False)
    return {
        "300 MB": long_lz4(),
        "cut by a byte": honest[:-1],
        "a byte short": lz4.block.compress(bytes(size - 1), store_size=False),
        "a byte long": lz4.block.compress(bytes(size + 1), store_size=False),
        "a match before the start": b"\x0f\xff\xff" + b"\xff" * 50,
    }


BOMBS = [(Codec.LZ4, name) for name in lz4_bombs(100)] + [(Codec.ZSTD, name) for name in zstd_bombs(100)]


def bomb_of(codec: Codec, name: str, size: int) -> bytes:
    """Cut to what a stored plane may have: a longer one is refused for its length alone."""
    return (lz4_bombs if codec is Codec.LZ4 else zstd_bombs)(size)[name][: size - 1]


def packed(codec: Codec, data: bytes) -> bytes:
    return lz4.block.compress(data, store_size=False) if codec is Codec.LZ4 else zstd_of(data)


def store_with(quantisation: Quantisation, codec: Codec, blob: bytes) -> KVStore:
    identity, geometry = quantised(quantisation)
    tier = MemoryTier()
    tier.blobs[REF.name] = (blob, Life(0.0, Clock().now * 2))
    return KVStore([tier], identity, geometry, CODECS[codec])


def expect_damage(store: KVStore) -> None:
    assert not store.load(REF, empty(REF))
    assert (store.counters.damaged, store.counters.misses, store.counters.hits) == (1, 1, 0)
    assert store.snapshot()["memory_quarantined"] == 1
    assert store.save(REF, payload_of(REF), TTL_S) and store.load(REF, empty(REF))


def zero_planes(codec: Codec, geometry: Geometry) -> list[bytes]:
    return [packed(codec, bytes(size)) for size in plane_sizes(geometry, BLOCK_TOKENS)]


@pytest.mark.parametrize("quantisation", Quantisation)
@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.ZSTD])
def test_the_forger_is_good(codec: Codec, quantisation: Quantisation) -> None:
    """Nothing wrong with it, and it is believed: else the tests below would prove nothing."""
    geometry = quantised(quantisation)[1]
    blob = forged(REF, planes(*zero_planes(codec, geometry)), codec, quantisation)
    assert store_with(quantisation, codec, blob).load(REF, empty(REF))


@pytest.mark.parametrize("quantisation", Quantisation)
@pytest.mark.parametrize(("codec", "name"), BOMBS, ids=lambda part: getattr(part, "name", part))
def test_a_bomb_is_damage_and_takes_no_memory(codec: Codec, name: str, quantisation: Quantisation) -> None:
    """CASES 6, as the first plane and as the last."""
    geometry = quantised(quantisation)[1]
    sound, sizes = zero_planes(codec, geometry), plane_sizes(geometry, BLOCK_TOKENS)
    for place in (0, -1):
        parts = [*sound]
        parts[place] = bomb_of(codec, name, sizes[place])
        blob = forged(REF, planes(*parts), codec, quantisation)
        store = store_with(quantisation, codec, blob)
        peak = Peak()
        expect_damage(store)
        assert peak.growth_bytes < MOST_BYTES


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("quantisation", [Quantisation.INT8, Quantisation.INT4])
@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, -1.0, -0.0, 0.0, 3e38, 1e38], ids=str)
def test_a_scale_that_nobody_writes_is_damage(scale: float, quantisation: Quantisation, codec: Codec) -> None:
    """Among sound ones; and a page that was read is finite. -0.0 is as good a 0 as any: for zeros."""
    geometry = quantised(quantisation)[1]
    payload = np.full(geometry.payload_bytes(BLOCK_TOKENS), 0x77, np.uint8)
    _, scales = geometry.values_and_scales(payload, BLOCK_TOKENS)
    scales[...] = np.float32([1.0]).view(np.uint8)
    sound = encoded(payload, codec, geometry)
    assert store_with(quantisation, codec, forged(REF, *sound, quantisation)).load(REF, empty(REF))
    scales[2, 1, 7] = np.float32([scale]).view(np.uint8)
    expect_damage(store_with(quantisation, codec, forged(REF, *encoded(payload, codec, geometry), quantisation)))


def encoded(payload: np.ndarray, codec: Codec, geometry: Geometry) -> tuple[bytes, Codec]:
    parts = CODECS[codec].encode(payload.data, geometry, BLOCK_TOKENS)
    return (payload.tobytes(), Codec.NONE) if parts is None else (b"".join(parts), codec)


def test_the_largest_scale_and_the_value_that_is_never_written_make_no_infinity() -> None:
    for quantisation, lowest in ((Quantisation.INT8, 0x80), (Quantisation.INT4, 0x88)):
        geometry = quantised(quantisation)[1]
        payload = np.full(geometry.payload_bytes(BLOCK_TOKENS), lowest, np.uint8)
        _, scales = geometry.values_and_scales(payload, BLOCK_TOKENS)
        largest = np.uint32(0x7F7F0000).view(np.float32) / np.float32(quantisation.levels + 1)
        scales[...] = np.float32([largest]).view(np.uint8)
        store = store_with(quantisation, Codec.NONE, forged(REF, payload.tobytes(), Codec.NONE, quantisation))
        into = empty(REF)
        assert store.load(REF, into)
        assert np.isfinite((np.frombuffer(into, "<u2").astype("<u4") << 16).view("<f4")).all()
