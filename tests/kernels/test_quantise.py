"""Rounding K and V to int8 or int4 is a fixed point in every dtype of the pages, within half a step, and causal."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from kernels.quantise import LEVELS, round_trip

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DIM = 8

dtypes, levels_of = st.sampled_from(DTYPES), st.sampled_from(list(LEVELS.values()))


def within(bits: int) -> st.SearchStrategy[float]:
    return st.floats(-(2.0**bits), 2.0**bits, width=32)


# A vector is all of one size, or of all sizes: near the largest number, usual, denormal in float16, in float32.
vectors = st.sampled_from([127, 16, 0, -14, -24, -126, -133, -149]).flatmap(
    lambda bits: arrays(np.float32, (4, DIM), elements=within(bits))
)


def finite_in(x: Tensor, dtype: torch.dtype) -> bool:
    return bool(torch.isfinite(x.to(dtype)).all())


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@settings(max_examples=400, deadline=None)
@given(vectors, dtypes, levels_of)
@example(np.full((4, DIM), 2.0**-149, np.float32), torch.float32, 127)
@example(np.full((4, DIM), 444 * 2.0**-149, np.float32), torch.float32, 127)
@example(np.full((4, DIM), 65504, np.float32), torch.float16, 127)
@example(np.full((4, DIM), torch.finfo(torch.float32).max, np.float32), torch.float32, 7)
def test_rounding_again_changes_nothing(values: np.ndarray, dtype: torch.dtype, levels: int) -> None:
    x = torch.from_numpy(values)
    if not finite_in(x, dtype):
        return
    once = round_trip(x.clone(), levels, dtype)
    assert once.dtype is dtype and torch.isfinite(once).all()
    assert_same_bits(round_trip(once.float(), levels, dtype), once)


@settings(max_examples=200, deadline=None)
@given(arrays(np.float32, (4, DIM), elements=within(20)), dtypes, levels_of)
def test_an_element_moves_by_half_a_step_at_most(values: np.ndarray, dtype: torch.dtype, levels: int) -> None:
    """Half a step of its own vector, and what the page's dtype cannot say anyway."""
    x = torch.from_numpy(values)
    if not finite_in(x, dtype):
        return
    moved = (round_trip(x.clone(), levels, dtype).float() - x).abs()
    step = x.abs().amax(-1, keepdim=True) / levels
    precision = torch.finfo(dtype)
    unsaid = x.abs() * precision.eps + precision.smallest_normal * precision.eps
    # Where a step is no normal float32 (values up to 1.5e-36), no scale can say it: the whole vector may go.
    lost = torch.where(step < torch.finfo(torch.float32).smallest_normal, x.abs(), 0.0)
    assert (moved <= step * 0.51 + 2 * step * precision.eps + unsaid + lost).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("levels", LEVELS.values(), ids=LEVELS)
def test_named_vectors(dtype: torch.dtype, levels: int) -> None:
    """CASES 11: nothing but zeros, one value, one outlier, one token; never NaN, never infinity."""
    zeros = torch.zeros(1, DIM)
    assert torch.equal(round_trip(zeros.clone(), levels, dtype), zeros.to(dtype))
    for constant in (1.0, -3.14159, 1e-3, 6e4, 1e-30, -1e-39):
        c = torch.full((1, DIM), constant).to(dtype).float()
        assert ((round_trip(c.clone(), levels, dtype).float() - c).abs() <= c.abs() / levels).all()
    outlier = torch.full((1, DIM), 1e-3)
    outlier[0, 3] = 1e4
    rounded = round_trip(outlier.clone(), levels, dtype).float()
    assert rounded[0, 3] == outlier.to(dtype)[0, 3] or abs(rounded[0, 3] / 1e4 - 1) < 2**-15
    assert (rounded[0, [0, 1, 2, 4, 5, 6, 7]] == 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_loud(bad: float) -> None:
    x = torch.ones(2, DIM)
    x[0, 5] = bad
    rounded = round_trip(x, 127, torch.bfloat16)
    assert rounded[0].isnan().all() and (rounded[1] == 1).all()


@settings(max_examples=50, deadline=None)
@given(vectors, dtypes, levels_of)
def test_a_vector_does_not_depend_on_those_beside_it(values: np.ndarray, dtype: torch.dtype, levels: int) -> None:
    """So that it is causal, and the same in a chunk of a prompt as in a step. Also where it lies strided."""
    x = torch.from_numpy(values)
    if not finite_in(x, dtype):
        return
    together = round_trip(x.clone(), levels, dtype)
    alone = torch.cat([round_trip(row[None].clone(), levels, dtype) for row in x])
    strided = torch.stack([x, x], 1)[:, 0]
    assert torch.equal(together, alone) and torch.equal(round_trip(strided, levels, dtype), together)
