"""The shape of a block: of its page, which the engine computes with, and of its payload, which is stored."""

import msgspec
import numpy as np
from numpy.typing import NDArray

from schemas.blob import (
    MAX_BLOCK_TOKENS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_PAYLOAD_BYTES,
    SCALE_BYTES,
    ElementType,
    Quantisation,
)
from schemas.errors import SetupError

Bytes = NDArray[np.uint8]


class Geometry(msgspec.Struct, frozen=True):
    """A page is [layers, 2 (K, V), heads, tokens, head_dim] of `dtype`; so is its payload, unless it is quantised.

    `holds_quantised`: the page is the payload already, and `dtype` what whole numbers times scales are computed in.

    Raises `SetupError` when the header has no room for it, or when quantising would not make it smaller.
    """

    layers: int
    heads: int
    head_dim: int
    dtype: ElementType
    quantisation: Quantisation = Quantisation.NONE
    holds_quantised: bool = False

    def __post_init__(self) -> None:
        for name, most in (("layers", MAX_LAYERS), ("heads", MAX_HEADS), ("head_dim", MAX_HEAD_DIM)):
            if not 1 <= getattr(self, name) <= most:
                raise SetupError(f"a KV block cannot have {name} = {getattr(self, name)}: the limits are 1 and {most}")
        if self.quantisation is not Quantisation.NONE and (
            self.head_dim % 2 or self.payload_bytes(1) >= self._plain_bytes(1)
        ):
            raise SetupError(
                f"heads of {self.head_dim} {self.dtype.name.lower()} values cannot be stored as "
                f"{self.quantisation.name.lower()}: use kv.quantisation = none"
            )

    def page_bytes(self, tokens: int) -> int:
        return self.payload_bytes(tokens) if self.holds_quantised else self._plain_bytes(tokens)

    def _plain_bytes(self, tokens: int) -> int:
        return 2 * self.layers * self.heads * tokens * self.head_dim * self.dtype.item_bytes

    def payload_bytes(self, tokens: int) -> int:
        """Never more than `page_bytes`."""
        return 2 * self.layers * self.heads * tokens * self.quantisation.vector_bytes(self.head_dim, self.dtype)

    def check_block_tokens(self, block_tokens: int) -> None:
        if block_tokens > MAX_BLOCK_TOKENS or self.payload_bytes(block_tokens) > MAX_PAYLOAD_BYTES:
            raise SetupError(f"a block of {block_tokens} tokens is too large to store; use a smaller kv.block_tokens")

    def values_and_scales(self, payload: Bytes, tokens: int) -> tuple[Bytes, Bytes]:
        """Views of a quantised payload: the bytes of values [layers * 2, heads, tokens, head_dim or half of it] and of
        scales [layers * 2, heads, tokens, 4]."""
        both = self.layers * 2
        pieces = payload.reshape(both, -1)
        scale_bytes = self.heads * tokens * SCALE_BYTES
        values, scales = pieces[:, :-scale_bytes], pieces[:, -scale_bytes:]
        shape = (both, self.heads, tokens, -1)
        return values.reshape(shape, copy=False), scales.reshape(shape, copy=False)

    def byte_planes(self, payload: Bytes, tokens: int) -> list[Bytes]:
        """Views of `payload`, most significant byte first, each [layers * 2, heads, head_dim, tokens] and strided.

        With the token axis innermost, neighbours are the same channel of neighbouring tokens: that is what compresses.
        A quantised payload is one plane of values and one of scales for each of their bytes.
        """
        if self.quantisation is Quantisation.NONE:
            shape = (self.layers * 2, self.heads, tokens, self.head_dim, self.dtype.item_bytes)
            return _planes(payload.reshape(shape))
        values, scales = self.values_and_scales(payload, tokens)
        return [*_planes(values[..., None]), *_planes(scales[:, :, :, None])]


def _planes(items: Bytes) -> list[Bytes]:
    """Of little-endian `items: [layers * 2, heads, tokens, n, bytes]`."""
    return [items[..., byte].transpose(0, 1, 3, 2) for byte in reversed(range(items.shape[-1]))]
