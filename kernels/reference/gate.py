"""The gate of a Llama MLP: SiLU(gate) * up."""

import torch
from torch import Tensor


def silu_gate(gate_up: Tensor) -> Tensor:
    """`gate_up: [R, 2 * I] float32`, gate first -> `[R, I] float32`.

    Spelled out, because torch's `silu` rounds differently in the scalar tail of a thread's share (170 of 4,096 values
    on AVX2), and where the tails are depends on the rows and the threads. `exp` does not; the rest is IEEE arithmetic.
    """
    gate, up = gate_up.chunk(2, dim=1)
    return torch.neg(gate).exp_().add_(1.0).reciprocal_().mul_(gate).mul_(up)
