import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.blob import (
    DIGESTED_BYTES,
    HEADER_BYTES,
    BlobHeader,
    Codec,
    DamagedBlob,
    ElementType,
    Quantisation,
    parse_header,
)
from schemas.errors import SetupError

HEADER = BlobHeader(
    codec=Codec.LZ4,
    quantisation=Quantisation.NONE,
    dtype=ElementType.BFLOAT16,
    tokenizer_hash=b"tokenizr",
    fingerprint=b"modelfpr",
    arithmetic=b"arithmet",
    layers=30,
    heads=3,
    head_dim=64,
    tokens=63,
    position=0x01020304,
    stored_bytes=0x00112233,
    token_hash=bytes(range(16)),
    key=bytes(range(32)),
)


def packed(**fields: tuple[int, str, int]) -> bytes:
    """HEADER with fields overwritten: name=(offset, struct format, value)."""
    data = bytearray(HEADER.pack() + bytes(32))
    for offset, kind, value in fields.values():
        struct.pack_into(kind, data, offset, value)
    return bytes(data)


def test_every_field_is_where_the_table_says() -> None:
    data = HEADER.pack()
    assert len(data) == DIGESTED_BYTES
    assert data[:8] == b"KVRB" + bytes([1, 1, 0, 3])
    assert data[8:32] == b"tokenizr" + b"modelfpr" + b"arithmet"
    assert data[32:40] == bytes([30, 0, 3, 0, 64, 0, 63, 0])
    assert data[40:48] == bytes([4, 3, 2, 1, 0x33, 0x22, 0x11, 0])
    assert data[48:64] == bytes(range(16))
    assert data[64:96] == bytes(range(32))


def test_a_header_comes_back_as_it_was() -> None:
    assert parse_header(HEADER.pack() + bytes(32)) == HEADER
    assert HEADER.payload_bytes == 2 * 30 * 3 * 63 * 64 * 2
    for quantisation, vector_bytes in ((Quantisation.INT8, 68), (Quantisation.INT4, 36)):
        header = msgspec.structs.replace(HEADER, quantisation=quantisation, stored_bytes=0x2233)
        assert parse_header(header.pack() + bytes(32)) == header
        assert header.payload_bytes == 2 * 30 * 3 * 63 * vector_bytes


HOSTILE = {
    "wrong magic": packed(magic=(0, "<I", 0)),
    "a pickle": b"\x80\x04\x95" + bytes(HEADER_BYTES),
    "version 0": packed(version=(4, "B", 0)),
    "a later version": packed(version=(4, "B", 2)),
    "unknown codec": packed(codec=(5, "B", 3)),
    "int4 of an odd head dim": packed(quantisation=(6, "B", 2), head_dim=(36, "<H", 63)),
    "more stored than int8 needs": packed(quantisation=(6, "B", 1), stored=(44, "<I", 2 * 30 * 3 * 63 * 68 + 1)),
    "unknown quantisation": packed(quantisation=(6, "B", 255)),
    "no dtype": packed(dtype=(7, "B", 0)),
    "unknown dtype": packed(dtype=(7, "B", 4)),
    "no layers": packed(layers=(32, "<H", 0)),
    "huge layers": packed(layers=(32, "<H", 65535)),
    "no heads": packed(heads=(34, "<H", 0)),
    "huge heads": packed(heads=(34, "<H", 65535)),
    "no head dim": packed(head_dim=(36, "<H", 0)),
    "huge head dim": packed(head_dim=(36, "<H", 65535)),
    "no tokens": packed(tokens=(38, "<H", 0)),
    "more tokens than a block": packed(tokens=(38, "<H", 1025)),
    "position past the end": packed(position=(40, "<I", 2**32 - 1)),
    "nothing stored": packed(stored=(44, "<I", 0)),
    "2 GiB stored": packed(stored=(44, "<I", 2**31)),
    "4 GiB stored": packed(stored=(44, "<I", 2**32 - 1)),
    "more stored than the payload has": packed(stored=(44, "<I", HEADER.payload_bytes + 1)),
    "more payload than the field can say": packed(
        layers=(32, "<H", 1024), heads=(34, "<H", 1024), head_dim=(36, "<H", 1024), stored=(44, "<I", 0)
    ),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_headers_are_damage(data: bytes) -> None:
    with pytest.raises(DamagedBlob):
        parse_header(data)


@pytest.mark.parametrize("size", [0, 1, 4, 96, 127])
def test_a_cut_header_is_damage(size: int) -> None:
    with pytest.raises(DamagedBlob):
        parse_header((HEADER.pack() + bytes(32))[:size])


@given(st.binary(max_size=200))
def test_any_bytes_are_a_header_or_damage(data: bytes) -> None:
    with pytest.raises(DamagedBlob):
        parse_header(data)


@given(st.binary(min_size=124, max_size=124))
def test_any_fields_after_the_magic_are_a_header_or_damage(data: bytes) -> None:
    try:
        header = parse_header(b"KVRB" + data)
    except DamagedBlob:
        return
    assert header.pack() == (b"KVRB" + data)[:DIGESTED_BYTES]


def test_dtypes_go_by_the_names_of_the_settings() -> None:
    assert [ElementType.named(name) for name in ("float32", "float16", "bfloat16")] == [1, 2, 3]
    assert [ElementType(value).item_bytes for value in (1, 2, 3)] == [4, 2, 2]
    with pytest.raises(SetupError, match="int8"):
        ElementType.named("int8")
