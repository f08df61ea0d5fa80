"""Blobs as somebody makes them who knows the format and can write to the store: their digests fit."""

import struct

import msgspec
from blake3 import blake3

from kvstore.geometry import Geometry
from kvstore.keys import BlockRef
from schemas.blob import BlobHeader, Codec, Quantisation
from tests.kvstore.blocks import GEOMETRY, IDENTITY


def forged(
    ref: BlockRef, stored: bytes, codec: Codec, quantisation: Quantisation = Quantisation.NONE, **changes: object
) -> bytes:
    """`changes`: fields of the header, or raw bytes of it as `at=(offset, struct format, value)`."""
    at = changes.pop("at", None)
    header = BlobHeader(
        codec=codec,
        quantisation=quantisation,
        dtype=IDENTITY.dtype,
        tokenizer_hash=IDENTITY.tokenizer_hash,
        fingerprint=IDENTITY.fingerprint,
        arithmetic=IDENTITY.arithmetic,
        layers=GEOMETRY.layers,
        heads=GEOMETRY.heads,
        head_dim=GEOMETRY.head_dim,
        tokens=ref.num_tokens,
        position=ref.start,
        stored_bytes=len(stored),
        token_hash=ref.token_hash,
        key=ref.key,
    )
    fields = bytearray(msgspec.structs.replace(header, **changes).pack())
    if at is not None:
        offset, kind, value = at  # type: ignore[misc]
        struct.pack_into(kind, fields, offset, value)
    return bytes(fields) + blake3(bytes(fields) + stored).digest() + stored


def planes(*parts: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def plane_sizes(geometry: Geometry, tokens: int) -> list[int]:
    vectors = 2 * geometry.layers * geometry.heads * tokens
    if geometry.quantisation is Quantisation.NONE:
        return [vectors * geometry.head_dim] * geometry.dtype.item_bytes
    return [
        vectors * geometry.quantisation.vector_bytes(geometry.head_dim, geometry.dtype) - 4 * vectors,
        *[vectors] * 4,
    ]
