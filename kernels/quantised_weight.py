"""A weight as GGUF keeps it: each row in blocks of 32 values along K, each block with a float16 scale of its own.

Layouts, after ggml-common.h: Q4_0 is `d, 16 bytes` and (q - 8) * d; Q4_1 is `d, m, 16 bytes` and q * d + m; value i of
a block is the low half of byte i, value 16 + i the high half. Q8_0 is `d, 32 signed bytes` and q * d.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_VALUES = 32
BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}


@dataclass(frozen=True, eq=False)
class QuantisedWeight:
    """`blocks: [N, K / 32 * block bytes] uint8`, perhaps a view of a mapped file: to be read only.

    `row_order: [N] int64`: output row i is row `row_order[i]` of `blocks`; None where they are in order. Raises
    `ValueError` for a format or a size that cannot be.
    """

    format: str
    blocks: Tensor
    row_order: Tensor | None = None

    def __post_init__(self) -> None:
        if self.format not in BLOCK_BYTES:
            raise ValueError(f"weights of format {self.format!r}: supported are {', '.join(BLOCK_BYTES)}")
        blocks = self.blocks
        if blocks.dtype != torch.uint8 or blocks.ndim != 2 or not blocks.is_contiguous():
            raise ValueError(f"blocks must be contiguous [N, bytes] uint8, got {list(blocks.shape)} {blocks.dtype}")
        if not blocks.shape[1] or blocks.shape[1] % self.block_bytes:
            raise ValueError(f"rows of {blocks.shape[1]} bytes are not whole blocks of {self.format}")
        if self.row_order is not None and self.row_order.shape != blocks.shape[:1]:
            raise ValueError(f"an order of {list(self.row_order.shape)} for {blocks.shape[0]} rows")

    @property
    def block_bytes(self) -> int:
        return BLOCK_BYTES[self.format]

    @property
    def outputs(self) -> int:
        """N."""
        return self.blocks.shape[0]

    @property
    def num_blocks(self) -> int:
        """G, of a row."""
        return self.blocks.shape[1] // self.block_bytes

    @property
    def inputs(self) -> int:
        """K."""
        return self.num_blocks * BLOCK_VALUES

    def rows(self, ids: Tensor) -> "QuantisedWeight":
        """The weight of rows `ids: [R] int64` alone."""
        return QuantisedWeight(self.format, self.blocks[ids if self.row_order is None else self.row_order[ids]])

    def whole(self) -> Tensor:
        """`[N, G, 32] int8`: what is multiplied by d: signed for Q4_0 and Q8_0, 0 to 15 for Q4_1."""
        blocks = self._in_order()
        if self.format == "Q8_0":
            return blocks[..., 2:].contiguous().view(torch.int8)
        halves = blocks[..., -BLOCK_VALUES // 2 :].contiguous()  # strided, the next line takes twice as long
        whole = torch.cat([halves & 15, halves >> 4], dim=-1).view(torch.int8)
        return whole - 8 if self.format == "Q4_0" else whole

    def scales(self) -> Tensor:
        """d: `[N, G] float32`."""
        return _float16(self._in_order(), 0)

    def minima(self) -> Tensor | None:
        """m: `[N, G] float32`, of Q4_1 only."""
        return _float16(self._in_order(), 2) if self.format == "Q4_1" else None

    def dequantise(self) -> Tensor:
        """`[N, K] float32`: a product, and with minima a sum, as the `gguf` package makes it."""
        values, minima = self.whole().float().mul_(self.scales()[..., None]), self.minima()
        return (values if minima is None else values.add_(minima[..., None])).flatten(1)

    def _in_order(self) -> Tensor:
        """`[N, G, block bytes]`."""
        blocks = self.blocks if self.row_order is None else self.blocks[self.row_order]
        return blocks.view(self.outputs, self.num_blocks, self.block_bytes)


def _float16(blocks: Tensor, at: int) -> Tensor:
    """`[N, G] float32`: the float16 at that byte of each block."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1).float()
