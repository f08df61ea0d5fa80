"""RMSNorm and the gate: right, and a function of each row alone."""

import pytest
import torch

from kernels.exactness import inexact_rows, pattern, threads
from kernels.reference.gate import silu_gate
from kernels.reference.norm import rms_norm


@pytest.mark.parametrize("width", [48, 576, 4096])
def test_rms_norm(width: int) -> None:
    x, weight = pattern((100, width), 1) * 3, pattern((width,), 2)
    expected = torch.nn.functional.rms_norm(x.double(), (width,), weight.double(), 1e-5).float()
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected, atol=1e-6, rtol=1e-6)
    assert inexact_rows(lambda rows: rms_norm(rows, weight, 1e-5), x) == []


@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
def test_silu_gate_with_any_number_of_threads(num_threads: int) -> None:
    """Five threads share 100 x 1000 values in pieces that end inside a vector."""
    x = pattern((100, 2000), 3) * 20
    gate, up = x.double().chunk(2, dim=1)
    torch.testing.assert_close(silu_gate(x), (torch.nn.functional.silu(gate) * up).float(), atol=1e-5, rtol=1e-5)
    with threads(num_threads):
        assert inexact_rows(silu_gate, x) == []


def test_silu_gate_of_large_values_is_finite() -> None:
    gate_up = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1.0, 1.0, 1.0, 1.0]])
    assert silu_gate(gate_up).tolist() == [[0.0, pytest.approx(0.0, abs=1e-40), 0.0, 100.0]]
