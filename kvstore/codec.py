"""How a payload becomes stored bytes and back. The only home of the compression libraries."""

import struct
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import lz4.block
import numpy as np
import zstandard

from kvstore.geometry import Bytes, Geometry
from kvstore.scratch import Scratch
from schemas.blob import Codec, DamagedBlob
from schemas.errors import SetupError

_LENGTH = struct.Struct("<I")


class BlockCodec(Protocol):
    """Stateless and thread-safe; what it borrows between calls belongs to the calling thread."""

    id: Codec

    def encode(self, payload: memoryview, geometry: Geometry, tokens: int) -> Sequence[memoryview] | None:
        """The parts to store, one after the other; valid until this thread's next `encode`. None: it does not pay."""

    def decode(self, buffer: memoryview, stored_bytes: int, geometry: Geometry, tokens: int) -> None:
        """In place: the first `stored_bytes` of `buffer` become the payload, which fills it.

        Raises `DamagedBlob`; then `buffer` holds anything. Allocates no more than the payload's size, whatever the
        stored bytes claim.
        """


class PlainCodec:
    """Stores the payload as it is, so that a blob can be mapped and viewed without a copy."""

    id = Codec.NONE

    def encode(self, payload: memoryview, geometry: Geometry, tokens: int) -> Sequence[memoryview]:
        return [payload]

    def decode(self, buffer: memoryview, stored_bytes: int, geometry: Geometry, tokens: int) -> None:
        if stored_bytes != len(buffer):
            raise DamagedBlob(f"a plain payload has {len(buffer)} bytes, {stored_bytes} are stored")


class PlanesCodec:
    """Byte planes, each compressed on its own behind its uint32 length; a plane of full length is raw.

    `decompress(packed, size)` returns at most `size` bytes, and allocates no more, or raises one of `errors`.
    """

    def __init__(
        self,
        id: Codec,
        compress: Callable[[Bytes], bytes],
        decompress: Callable[[memoryview, int], bytes],
        errors: tuple[type[Exception], ...],
    ) -> None:
        self.id = id
        self._compress = compress
        self._decompress = decompress
        self._errors = errors
        self._scratch = Scratch()

    def encode(self, payload: memoryview, geometry: Geometry, tokens: int) -> Sequence[memoryview] | None:
        scratch = self._scratch.take(len(payload))
        parts: list[memoryview] = []
        for view in geometry.byte_planes(np.frombuffer(payload, np.uint8), tokens):
            flat, scratch = scratch[: view.size], scratch[view.size :]
            np.copyto(flat.reshape(view.shape), view)
            packed = self._compress(flat)
            kept = memoryview(packed) if len(packed) < len(flat) else flat.data
            parts += [memoryview(_LENGTH.pack(len(kept))), kept]
        return parts if sum(map(len, parts)) < len(payload) else None

    def decode(self, buffer: memoryview, stored_bytes: int, geometry: Geometry, tokens: int) -> None:
        views = geometry.byte_planes(np.frombuffer(buffer, np.uint8), tokens)
        scratch = self._scratch.take(len(buffer))
        stored = buffer[:stored_bytes]
        # Every plane leaves the buffer before the payload overwrites it.
        planes = []
        for view in views:
            copy, scratch = scratch[: view.size], scratch[view.size :]
            packed, stored = _split(stored)
            planes.append(self._plane(packed, copy))
        if len(stored):
            raise DamagedBlob(f"{len(stored)} bytes follow the last plane")
        for view, plane in zip(views, planes, strict=True):
            np.copyto(view, plane.reshape(view.shape))

    def _plane(self, packed: memoryview, copy: Bytes) -> Bytes:
        """A plane of the size of `copy`, which holds it if it was stored raw."""
        if len(packed) == len(copy):
            copy.data[:] = packed
            return copy
        try:
            plane = self._decompress(packed, len(copy))
        except self._errors as error:
            raise DamagedBlob(f"a plane does not decompress: {error}") from error
        if len(plane) != len(copy):
            raise DamagedBlob(f"a plane has {len(plane)} bytes, not {len(copy)}")
        return np.frombuffer(plane, np.uint8)


def _split(stored: memoryview) -> tuple[memoryview, memoryview]:
    """The next plane as stored, and what follows it."""
    if len(stored) < _LENGTH.size:
        raise DamagedBlob("the length of a plane is cut off")
    (length,) = _LENGTH.unpack_from(stored)
    end = _LENGTH.size + length
    if length == 0 or end > len(stored):
        raise DamagedBlob(f"a plane claims {length} bytes, {len(stored) - _LENGTH.size} are there")
    return stored[_LENGTH.size : end], stored[end:]


def _lz4_compress(plane: Bytes) -> bytes:
    packed: bytes = lz4.block.compress(plane, store_size=False)
    return packed


def _lz4_decompress(packed: memoryview, size: int) -> bytes:
    plane: bytes = lz4.block.decompress(packed, uncompressed_size=size)
    return plane


class _Zstd(threading.local):
    """A thread's own contexts: they cannot be shared, and making them costs more than a small plane."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(compression_params=_ZSTD_PARAMETERS)
        self._decompressor = zstandard.ZstdDecompressor()

    def compress(self, plane: Bytes) -> bytes:
        return self._compressor.compress(plane.data)

    def decompress(self, packed: memoryview, size: int) -> bytes:
        """A frame says how much memory it wants, for its window and for what it holds: it is asked first."""
        frame = zstandard.get_frame_parameters(packed)
        if frame.content_size != size or frame.window_size > max(size, _ZSTD_LEAST_WINDOW):
            raise zstandard.ZstdError(f"the frame claims {frame.content_size} bytes in a window of {frame.window_size}")
        return self._decompressor.decompress(packed, max_output_size=size, allow_extra_data=False)


# KV hardly repeats: what pays is the coding of single bytes, and matches only cost. A table of 64 positions and matches
# of 6 bytes or more pack 25 % faster than plain level 1, and a little smaller (decision 0031).
_ZSTD_PARAMETERS = zstandard.ZstdCompressionParameters.from_level(1, hash_log=6, min_match=6)
_ZSTD_LEAST_WINDOW = 1024
_zstd = _Zstd()

PLAIN = PlainCodec()
CODECS: dict[Codec, BlockCodec] = {
    codec.id: codec
    for codec in (
        PLAIN,
        PlanesCodec(Codec.LZ4, _lz4_compress, _lz4_decompress, (lz4.block.LZ4BlockError,)),
        PlanesCodec(Codec.ZSTD, _zstd.compress, _zstd.decompress, (zstandard.ZstdError,)),
    )
}


def codec_named(name: str) -> BlockCodec:
    """`none`, `lz4` or `zstd`, as in the setting kv.codec. Raises `SetupError` for another."""
    for codec in CODECS.values():
        if codec.id.name.lower() == name:
            return codec
    raise SetupError(f"unknown kv.codec {name!r}: use one of {', '.join(id.name.lower() for id in CODECS)}")
