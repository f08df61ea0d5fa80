import struct
import threading

import lz4.block
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.codec import CODECS, PLAIN, BlockCodec, codec_named
from kvstore.geometry import Geometry
from schemas.blob import Codec, DamagedBlob, ElementType, Quantisation
from schemas.errors import SetupError
from tests.kvstore.blocks import GEOMETRY, kv_like

LZ4 = codec_named("lz4")

geometries = st.one_of(
    st.builds(
        Geometry,
        st.integers(1, 5),
        st.integers(1, 4),
        st.sampled_from([1, 2, 16, 24, 64]),
        st.sampled_from(ElementType),
    ),
    st.builds(
        Geometry,
        st.integers(1, 3),
        st.integers(1, 4),
        st.sampled_from([6, 16, 64]),
        st.sampled_from(ElementType),
        st.sampled_from([Quantisation.INT8, Quantisation.INT4]),
    ),
)
tokens_of_a_block = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 128]))


def encoded(codec: BlockCodec, payload: memoryview, geometry: Geometry, tokens: int) -> bytes | None:
    parts = codec.encode(payload, geometry, tokens)
    return None if parts is None else b"".join(parts)


def decoded(codec: BlockCodec, stored: bytes, geometry: Geometry, tokens: int) -> memoryview:
    buffer = memoryview(bytearray(geometry.payload_bytes(tokens)))
    buffer[: len(stored)] = stored
    codec.decode(buffer, len(stored), geometry, tokens)
    return buffer


@settings(max_examples=60, deadline=None)
@given(geometries, tokens_of_a_block, st.integers(0, 2**32 - 1), st.sampled_from(list(CODECS.values())))
def test_payloads_come_back_bit_for_bit(geometry: Geometry, tokens: int, seed: int, codec: BlockCodec) -> None:
    payload = kv_like(geometry, tokens, seed)[: geometry.payload_bytes(tokens)]
    stored = encoded(codec, payload, geometry, tokens)
    if stored is not None:
        assert len(stored) <= len(payload)
        assert decoded(codec, stored, geometry, tokens) == payload


def test_kv_gets_smaller_and_noise_is_left_alone() -> None:
    for dtype in ElementType:
        geometry = Geometry(4, 3, 64, dtype)
        payload = kv_like(geometry, 64)
        stored = encoded(LZ4, payload, geometry, 64)
        assert stored is not None and len(stored) < 0.9 * len(payload)
        noise = np.random.default_rng(0).bytes(len(payload))
        assert LZ4.encode(memoryview(noise), geometry, 64) is None


def test_planes_are_laid_out_as_documented() -> None:
    """By loops: most significant byte first, each plane ordered layer, K/V, head, dim, token."""
    tokens = 5
    payload = kv_like(GEOMETRY, tokens)
    shape = (GEOMETRY.layers, 2, GEOMETRY.heads, tokens, GEOMETRY.head_dim)
    words = np.frombuffer(payload, "<u2").reshape(shape)
    planes = [
        bytes(
            int(words[layer, kv, head, token, dim]) >> shift & 255
            for layer in range(GEOMETRY.layers)
            for kv in range(2)
            for head in range(GEOMETRY.heads)
            for dim in range(GEOMETRY.head_dim)
            for token in range(tokens)
        )
        for shift in (8, 0)
    ]
    stored = encoded(LZ4, payload, GEOMETRY, tokens)
    assert stored is not None
    offset = 0
    for plane in planes:
        (length,) = struct.unpack_from("<I", stored, offset)
        body = stored[offset + 4 : offset + 4 + length]
        assert plane == (body if length == len(plane) else lz4.block.decompress(body, uncompressed_size=len(plane)))
        offset += 4 + length
    assert offset == len(stored)


def test_a_plane_that_does_not_compress_stays_raw_beside_one_that_does() -> None:
    geometry, tokens = Geometry(2, 2, 32, ElementType.BFLOAT16), 32
    words = np.random.default_rng(0).integers(0, 256, geometry.payload_bytes(tokens) // 2).astype("<u2") | 0x3F00
    payload = memoryview(words.tobytes())
    stored = encoded(LZ4, payload, geometry, tokens)
    assert stored is not None
    (first,) = struct.unpack_from("<I", stored)
    (second,) = struct.unpack_from("<I", stored, 4 + first)
    assert first < second == len(payload) // 2
    assert decoded(LZ4, stored, geometry, tokens) == payload


GOOD = encoded(LZ4, kv_like(GEOMETRY, 16), GEOMETRY, 16)
assert GOOD is not None
PLANE = GEOMETRY.payload_bytes(16) // 2
BOMB = lz4.block.compress(bytes(10_000_000), store_size=False)
ZEROS = lz4.block.compress(bytes(PLANE), store_size=False)
SHORT = lz4.block.compress(bytes(PLANE - 1), store_size=False)


def plane(data: bytes, length: int | None = None) -> bytes:
    return struct.pack("<I", len(data) if length is None else length) + data


HOSTILE = {
    "nothing": b"",
    "a cut length": b"\1\0\0",
    "one plane of two": GOOD[: 4 + struct.unpack_from("<I", GOOD)[0]],
    "cut by one byte": GOOD[:-1],
    "followed by one byte": GOOD + b"\0",
    "an empty plane": plane(b"") + plane(b""),
    "a plane of 4 GiB": plane(b"xx", 2**32 - 1),
    "a length past the end": plane(b"xx", 3),
    "a last plane that claims more": plane(ZEROS) + plane(ZEROS, len(ZEROS) + 5),
    "junk": plane(b"\xff" * 100) + plane(b"\xff" * 100),
    "a bomb of 10 MB": plane(BOMB[: PLANE - 1]) + plane(SHORT),
    "a plane too short": plane(SHORT) + plane(SHORT),
}


@pytest.mark.parametrize("stored", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_payloads_are_damage(stored: bytes) -> None:
    """As if their digest fitted: whoever can write to the store can make one that does."""
    with pytest.raises(DamagedBlob):
        decoded(LZ4, stored, GEOMETRY, 16)


@given(st.binary(max_size=300))
def test_any_bytes_decode_or_are_damage(stored: bytes) -> None:
    with pytest.raises(DamagedBlob):
        decoded(LZ4, stored, GEOMETRY, 16)


def test_the_decompressor_is_bounded_by_the_plane(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = lz4.block.decompress

    def watched(packed: memoryview, uncompressed_size: int) -> bytes:
        asked.append(uncompressed_size)
        return bytes(real(packed, uncompressed_size=uncompressed_size))

    monkeypatch.setattr(lz4.block, "decompress", watched)
    decoded(LZ4, GOOD, GEOMETRY, 16)
    assert asked and set(asked) == {PLANE}


def test_plain_payloads_are_stored_as_they_are() -> None:
    payload = kv_like(GEOMETRY, 16)
    assert encoded(PLAIN, payload, GEOMETRY, 16) == payload
    with pytest.raises(DamagedBlob):
        decoded(PLAIN, bytes(payload[:-1]), GEOMETRY, 16)


def test_threads_do_not_share_buffers() -> None:
    payloads = [kv_like(GEOMETRY, 16, seed) for seed in range(4)]
    wrong: list[int] = []

    def work(payload: memoryview) -> None:
        for _ in range(100):
            stored = encoded(LZ4, payload, GEOMETRY, 16)
            assert stored is not None
            if decoded(LZ4, stored, GEOMETRY, 16) != payload:
                wrong.append(1)

    threads = [threading.Thread(target=work, args=(payload,)) for payload in payloads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_codecs_go_by_the_names_of_the_settings() -> None:
    assert codec_named("none").id is Codec.NONE
    assert codec_named("lz4").id is Codec.LZ4
    assert codec_named("zstd").id is Codec.ZSTD
    with pytest.raises(SetupError, match="zip"):
        codec_named("zip")
