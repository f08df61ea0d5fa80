"""Pages into quantised payloads and back, in numpy: store threads must not start torch's thread pools.

What is stored of a vector (one token in one head) of absolute maximum m: `scale`, which is m / levels cut to 17
significant bits, and `value = round(x / m * levels)`, ties to even. Read back, an element is `value * scale` rounded
to the page's type. `kernels.quantise` is the definition: what it rounded comes back bit for bit, and quantising what
came back gives the same payload again.
"""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.geometry import Bytes, Geometry
from kvstore.scratch import Scratch
from schemas.blob import DamagedBlob, ElementType, Quantisation
from schemas.errors import Internal

Floats = NDArray[np.float32]
Array = NDArray[Any]

_WORD = {ElementType.FLOAT32: "<u4", ElementType.FLOAT16: "<u2", ElementType.BFLOAT16: "<u2"}
_LARGEST = {
    ElementType.FLOAT32: np.finfo(np.float32).max,
    ElementType.FLOAT16: np.float32(np.finfo(np.float16).max),
    ElementType.BFLOAT16: np.uint32(0x7F7F0000).view(np.float32),
}
_SCALE_BITS = np.uint32(0xFFFFFF80)
_EXACT_BELOW = np.float32(2.0**-132)  # a scale this small has few bits by itself


class NotFinitePage(Internal):
    """A page holds NaN or infinity, or nearly: there is no scale for that, and nobody else should read it."""


class PageQuantiser(Protocol):
    """What stands between a page and the payload of its blob."""

    def pack(self, page: memoryview, tokens: int) -> memoryview:
        """The payload; valid until this thread's next call. Raises `NotFinitePage`."""
        ...

    def unpack(self, buffer: memoryview, tokens: int) -> None:
        """In place: the payload at the start of `buffer` becomes the page, which fills it.

        Raises `DamagedBlob` for scales that `pack` never makes.
        """
        ...


def quantiser_for(geometry: Geometry) -> PageQuantiser | None:
    """None: a page is stored as it is, whatever its bytes."""
    if geometry.quantisation is Quantisation.NONE:
        return None
    return HeldQuantised(geometry) if geometry.holds_quantised else Quantiser(geometry)


class Quantiser:
    """For pages of one geometry. Thread-safe; the buffers of `pack` and `unpack` belong to the calling thread."""

    def __init__(self, geometry: Geometry) -> None:
        assert geometry.quantisation is not Quantisation.NONE
        self._geometry = geometry
        self._levels = np.float32(geometry.quantisation.levels)
        self._largest_scale = largest_scale(geometry)
        self._payload, self._floats, self._small = Scratch(), Scratch(), Scratch()

    def pack(self, page: memoryview, tokens: int) -> memoryview:
        geometry = self._geometry
        shape = (geometry.layers * 2, geometry.heads, tokens, geometry.head_dim)
        words = np.frombuffer(page, _WORD[geometry.dtype]).reshape(shape)
        floats = self._floats.take(4 * words.size).view(np.float32).reshape(shape)
        _to_float32(words, geometry.dtype, floats)
        largest = self._largest(words)
        scales = scales_of(largest, self._levels)
        whole = self._whole(floats, largest)
        if not scales.all():
            whole[scales == 0] = 0

        payload = self._payload.take(geometry.payload_bytes(tokens))
        values, scale_bytes = geometry.values_and_scales(payload, tokens)
        if geometry.quantisation is Quantisation.INT4:
            np.bitwise_and(whole[..., 0::2].view(np.uint8), 15, out=values)
            values |= whole[..., 1::2].view(np.uint8) << 4
        else:
            values[...] = whole.view(np.uint8)
        scale_bytes[...] = scales[..., None].view(np.uint8)
        return payload.data

    def unpack(self, buffer: memoryview, tokens: int) -> None:
        geometry = self._geometry
        size = geometry.payload_bytes(tokens)
        payload = self._payload.take(size)
        payload.data[:] = buffer[:size]
        values, scale_bytes = geometry.values_and_scales(payload, tokens)
        scales = np.ascontiguousarray(scale_bytes).view("<f4")
        check_scales(values, scales, self._largest_scale)
        shape = (*values.shape[:-1], geometry.head_dim)
        floats = self._floats.take(4 * values.size * geometry.head_dim // values.shape[-1]).view(np.float32)
        floats = floats.reshape(shape)
        _spread(values, geometry.quantisation, floats)
        floats *= scales
        _from_float32(floats, geometry.dtype, np.frombuffer(buffer, _WORD[geometry.dtype]).reshape(shape))

    def _largest(self, words: Array) -> Floats:
        """The absolute maximum of each vector: bit patterns without a sign are ordered as their numbers are."""
        sign = words.dtype.type(1 << (8 * words.itemsize - 1))
        largest = np.bitwise_and(words, ~sign).max(axis=-1)
        floats = np.empty(largest.shape, np.float32)
        _to_float32(largest, self._geometry.dtype, floats)
        if not (floats <= self._largest_scale * self._levels).all():
            raise NotFinitePage("the page holds NaN or infinity, or a number too large for a scale")
        return floats

    def _whole(self, floats: Floats, largest: Floats) -> NDArray[np.int8]:
        """`floats`, which are overwritten, as multiples of their scale."""
        floats /= np.where(largest == 0, np.float32(1), largest)[..., None]
        floats *= self._levels
        np.rint(floats, out=floats)
        whole = self._small.take(floats.size).view(np.int8).reshape(floats.shape)
        np.copyto(whole, floats, casting="unsafe")
        return whole


class HeldQuantised:
    """For pages that hold whole numbers and scales themselves: both are only looked at. Thread-safe."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._largest_scale = largest_scale(geometry)

    def pack(self, page: memoryview, tokens: int) -> memoryview:
        try:
            self.unpack(page, tokens)
        except DamagedBlob as error:
            raise NotFinitePage(f"the page holds NaN or infinity, or a number too large: {error.message}") from error
        return page

    def unpack(self, buffer: memoryview, tokens: int) -> None:
        values, scale_bytes = self._geometry.values_and_scales(np.frombuffer(buffer, np.uint8), tokens)
        check_scales(values, np.ascontiguousarray(scale_bytes).view("<f4"), self._largest_scale)


def largest_scale(geometry: Geometry) -> np.float32:
    """One more than there are levels: what `pack` never writes has a place in the bits."""
    return np.float32(_LARGEST[geometry.dtype] / np.float32(geometry.quantisation.levels + 1))


def check_scales(values: Bytes, scales: Floats, largest: np.float32) -> None:
    """A page is finite whatever its payload says, and a scale of 0 is for zeros only. Raises `DamagedBlob`."""
    if not (scales >= 0).all() or scales.max() > largest:
        raise DamagedBlob(f"a scale is outside of 0 to {largest}")
    if not scales.all() and values[scales[..., 0] == 0].any():
        raise DamagedBlob("values other than 0 have the scale 0")


def scales_of(largest: Floats, levels: np.float32) -> Floats:
    """Cut to 17 bits, so that `levels * scale` is exact in float32."""
    scales: Floats = np.divide(largest, levels, dtype=np.float32)
    cut: Floats = (scales.view(np.uint32) & _SCALE_BITS).view(np.float32)
    return np.where(scales < _EXACT_BELOW, scales, cut)


def page_floats(geometry: Geometry, page: memoryview, tokens: int, out: Floats) -> None:
    """What a page stands for: `out: [layers * 2, heads, tokens, head_dim]`, which is overwritten."""
    if not geometry.holds_quantised:
        _to_float32(np.frombuffer(page, _WORD[geometry.dtype]).reshape(out.shape), geometry.dtype, out)
        return
    values, scale_bytes = geometry.values_and_scales(np.frombuffer(page, np.uint8), tokens)
    _spread(values, geometry.quantisation, out)
    out *= np.ascontiguousarray(scale_bytes).view("<f4")


def write_page(floats: Floats, dtype: ElementType, page: memoryview) -> None:
    """`floats`, which are overwritten, rounded to a page of `dtype`. What is no number stays none."""
    with np.errstate(over="ignore"):
        nan = np.isnan(floats) if dtype is ElementType.BFLOAT16 else None
        words = np.frombuffer(page, _WORD[dtype]).reshape(floats.shape)
        _from_float32(floats, dtype, words)
        if nan is not None:
            words[nan] = 0x7FC0


def _spread(values: Bytes, quantisation: Quantisation, out: Floats) -> None:
    """The whole numbers of a payload."""
    if quantisation is Quantisation.INT4:
        np.copyto(out[..., 0::2], (values << 4).view(np.int8) >> 4)
        np.copyto(out[..., 1::2], values.view(np.int8) >> 4)
    else:
        np.copyto(out, values.view(np.int8))


def _to_float32(words: Array, dtype: ElementType, out: Floats) -> None:
    if dtype is ElementType.BFLOAT16:
        np.left_shift(words, np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)
    else:
        np.copyto(out, words.view("<f2" if dtype is ElementType.FLOAT16 else "<f4"))


def _from_float32(floats: Floats, dtype: ElementType, out: Array) -> None:
    """Rounds to even; `floats` are overwritten."""
    if dtype is ElementType.FLOAT32:
        np.copyto(out.view("<f4"), floats)
    elif dtype is ElementType.FLOAT16:
        with np.errstate(over="ignore"):
            np.copyto(out.view("<f2"), floats, casting="same_kind")
    else:
        bits = floats.view(np.uint32)
        bits += ((bits >> 16) & 1) + np.uint32(0x7FFF)
        bits >>= 16
        np.copyto(out, bits, casting="unsafe")
