"""The gate of a Llama MLP: SiLU(gate) * up."""

from torch import Tensor

from kernels.reference.int8.elementary import exp


def silu_gate(gate_up: Tensor) -> Tensor:
    """`gate_up: [R, 2 * I] float32`, gate first -> `[R, I] float32`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate / (1.0 + exp(-gate)) * up
