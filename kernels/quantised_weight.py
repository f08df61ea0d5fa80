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

    `row_order: [N] int64`: output row i is row `row_order[i]` of `blocks`; None where they are in order.
    """

    format: str
    blocks: Tensor
    row_order: Tensor | None = None

    @property
    def block_bytes(self) -> int:
        return BLOCK_BYTES[self.format]

    @property
    def outputs(self) -> int:
        """N."""
        return self.blocks.shape[0]

    @property
    def inputs(self) -> int:
        """K."""
        return self.blocks.shape[1] // self.block_bytes * BLOCK_VALUES

    def dequantise(self) -> Tensor:
        """`[N, K] float32`, the rows in the order of the outputs."""
        blocks = self.blocks if self.row_order is None else self.blocks[self.row_order]
        blocks = blocks.reshape(-1, self.block_bytes)
        if self.format == "Q8_0":
            values = blocks[:, 2:].view(torch.int8).float().mul_(_float16(blocks, 0))
        elif self.format == "Q4_0":
            values = _nibbles(blocks[:, 2:]).sub_(8.0).mul_(_float16(blocks, 0))
        else:
            values = _nibbles(blocks[:, 4:]).mul_(_float16(blocks, 0)).add_(_float16(blocks, 2))
        return values.view(self.outputs, self.inputs)


def _float16(blocks: Tensor, at: int) -> Tensor:
    """`[blocks, 1] float32`: the float16 at that byte of each block."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """`[blocks, 16] uint8 -> [blocks, 32] float32`: the low halves, then the high ones."""
    return torch.cat([packed & 0x0F, packed >> 4], dim=1).float()
