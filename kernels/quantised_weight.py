"""A matrix of 4- or 8-bit weights in the blocks of a GGUF file, as they lie there: no wider copy in memory.

A block is 32 neighbours of one row (llama.cpp's `ggml-common.h`). d and m are float16; of a byte of 4-bit values the
low nibble is element j, the high one element j + 16:

    Q4_0  d, 16 bytes       (q - 8) * d
    Q4_1  d, m, 16 bytes    q * d + m
    Q8_0  d, 32 int8        q * d
"""

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
"""Weights of a block, and activations that share a scale."""

BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}


@dataclass(frozen=True, eq=False)
class QuantisedWeight:
    """`blocks: [N, K / 32 * block bytes] uint8`, contiguous, of `format`; `bytes` may be those of a mapped file.

    `order: [N] int64`, if given: row i of the matrix is row `order[i]` of the blocks. A GGUF may keep the rows of Q and
    K in another order than Hugging Face does. Raises `ValueError` for a format or a size that cannot be.
    """

    format: str
    blocks: Tensor
    order: Tensor | None = None

    def __post_init__(self) -> None:
        if self.format not in BLOCK_BYTES:
            raise ValueError(f"weights of format {self.format!r}: supported are {', '.join(BLOCK_BYTES)}")
        blocks = self.blocks
        if blocks.dtype != torch.uint8 or blocks.ndim != 2 or not blocks.is_contiguous():
            raise ValueError(f"blocks must be contiguous [N, bytes] uint8, got {list(blocks.shape)} {blocks.dtype}")
        if not blocks.shape[1] or blocks.shape[1] % BLOCK_BYTES[self.format]:
            raise ValueError(f"rows of {blocks.shape[1]} bytes are not whole blocks of {self.format}")
        if self.order is not None and self.order.shape != blocks.shape[:1]:
            raise ValueError(f"an order of {list(self.order.shape)} for {blocks.shape[0]} rows")

    @property
    def outputs(self) -> int:
        """N."""
        return self.blocks.shape[0]

    @property
    def groups(self) -> int:
        """Blocks of a row."""
        return self.blocks.shape[1] // BLOCK_BYTES[self.format]

    @property
    def inputs(self) -> int:
        """K."""
        return self.groups * GROUP

    def rows(self, ids: Tensor) -> "QuantisedWeight":
        """The matrix of rows `ids: [R] int64`."""
        return QuantisedWeight(self.format, self.blocks[ids if self.order is None else self.order[ids]])

    def values(self) -> Tensor:
        """`[N, G, 32] int8`: the whole numbers, signed for Q4_0 and Q8_0, 0 to 15 for Q4_1."""
        blocks = self._ordered()
        if self.format == "Q8_0":
            return blocks[..., 2:].contiguous().view(torch.int8)
        nibbles = blocks[..., -GROUP // 2 :]
        values = torch.cat([nibbles & 15, nibbles >> 4], dim=-1).view(torch.int8)
        return values - 8 if self.format == "Q4_0" else values

    def scales(self) -> Tensor:
        """d: `[N, G] float32`."""
        return _halves(self._ordered()[..., :2])

    def minima(self) -> Tensor | None:
        """m: `[N, G] float32`, of Q4_1 only."""
        return _halves(self._ordered()[..., 2:4]) if self.format == "Q4_1" else None

    def _ordered(self) -> Tensor:
        """`[N, G, block bytes]`."""
        blocks = self.blocks if self.order is None else self.blocks[self.order]
        return blocks.view(self.outputs, self.groups, -1)


def _halves(two_bytes: Tensor) -> Tensor:
    return two_bytes.contiguous().view(torch.float16).squeeze(-1).float()
