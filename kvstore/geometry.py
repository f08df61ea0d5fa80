"""The shape of a block's payload, and its byte planes."""

import msgspec
import numpy as np
from numpy.typing import NDArray

from schemas.blob import MAX_BLOCK_TOKENS, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_PAYLOAD_BYTES, ElementType
from schemas.errors import SetupError

Bytes = NDArray[np.uint8]


class Geometry(msgspec.Struct, frozen=True):
    """What a payload looks like in memory: [layers, 2 (K, V), heads, tokens, head_dim] of `dtype`.

    Raises `SetupError` when the header has no room for it.
    """

    layers: int
    heads: int
    head_dim: int
    dtype: ElementType

    def __post_init__(self) -> None:
        for name, most in (("layers", MAX_LAYERS), ("heads", MAX_HEADS), ("head_dim", MAX_HEAD_DIM)):
            if not 1 <= getattr(self, name) <= most:
                raise SetupError(f"a KV block cannot have {name} = {getattr(self, name)}: the limits are 1 and {most}")

    def payload_bytes(self, tokens: int) -> int:
        return 2 * self.layers * self.heads * tokens * self.head_dim * self.dtype.item_bytes

    def check_block_tokens(self, block_tokens: int) -> None:
        if block_tokens > MAX_BLOCK_TOKENS or self.payload_bytes(block_tokens) > MAX_PAYLOAD_BYTES:
            raise SetupError(f"a block of {block_tokens} tokens is too large to store; use a smaller kv.block_tokens")

    def byte_planes(self, payload: Bytes, tokens: int) -> list[Bytes]:
        """Views of `payload`, most significant byte first, each [layers * 2 * heads, head_dim, tokens] and strided.

        With the token axis innermost, neighbours are the same channel of neighbouring tokens: that is what compresses.
        """
        size = self.dtype.item_bytes
        items = payload.reshape(2 * self.layers * self.heads, tokens, self.head_dim, size)
        return [items[..., size - 1 - i].transpose(0, 2, 1) for i in range(size)]
