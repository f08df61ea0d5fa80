"""The definition of the arithmetic int8: single roundings are single, rows are their own, values are near the truth."""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from kernels.exactness import pattern
from kernels.page_form import PageForm
from kernels.quantise import LEVELS, round_trip, whole_and_scale
from kernels.quantised_weight import BLOCK_BYTES, QuantisedWeight
from kernels.reference import int8

FORMATS = list(BLOCK_BYTES)
LARGEST, SMALLEST = 2.0**128 - 2.0**104, 2.0**-149


@dataclass(frozen=True)
class Rows:
    start: int
    rows: int
    pages: list[int]


def rounded(exact: Fraction) -> float:
    """To float32, ties to even, by whole numbers alone."""
    size, sign = abs(exact), -1.0 if exact < 0 else 1.0
    if not size:
        return 0.0
    exponent = max(size.numerator.bit_length() - size.denominator.bit_length() - 1, -126)
    if size >= Fraction(2) ** (exponent + 1):
        exponent += 1
    unit = Fraction(2) ** (exponent - 23)
    value = round(size / unit) * unit  # of a Fraction: half to even
    return sign * (float(value) if value < 2**128 else math.inf)


any_float32 = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.integers(-(2**24), 2**24).map(float),
    st.builds(lambda m, e: m * 2.0**e, st.integers(-(2**24) + 1, 2**24 - 1), st.integers(-149, 100)),
)


@settings(max_examples=2000, deadline=None)
@given(any_float32, any_float32, any_float32)
@example(1.0 + 2.0**-12, 1.0 + 2.0**-12, 2.0**-80)
@example(1.0 + 2.0**-12, 1.0 + 2.0**-12, -(2.0**-80))
@example(2.0**-75, 2.0**-75, 2.0**-149)
@example(2.0**-75, -(2.0**-75), 2.0**-149)
@example(LARGEST, 1.0, 2.0**103)
@example(LARGEST, 1.0, 2.0**103 - 2.0**80)
def test_fma_rounds_once(a: float, b: float, c: float) -> None:
    found = int8.fma(torch.tensor(a), b, torch.tensor(c)).item()
    assert found == rounded(Fraction(a) * Fraction(b) + Fraction(c))


def test_fma_rounds_ties_once_among_many() -> None:
    """Sums that lie a little beside a tie of float32: float64 alone would round some of them twice."""
    m = pattern((5000,), 1).mul(250).round() * 2.0**-23
    a, b = 1 + m, 1 - m  # the product is a little less than 1
    c = pattern((5000,), 2).mul(2**22).round().mul(2) + 2.0**24 * 1.5
    found = int8.fma(a, b, c)
    twice = (a.double() * b.double() + c.double()).float()
    expected = torch.tensor(
        [
            rounded(Fraction(x) * Fraction(y) + Fraction(z))
            for x, y, z in zip(*(t.tolist() for t in (a, b, c)), strict=True)
        ]
    )
    assert torch.equal(found, expected)
    assert not torch.equal(twice, expected), "the inputs tell nothing"


def test_fma_of_what_is_not_finite() -> None:
    inf, nan = math.inf, math.nan
    a = torch.tensor([inf, inf, 0.0, nan, 1.0, 2.0**100])
    b = torch.tensor([1.0, 0.0, inf, 1.0, -inf, 2.0**100])
    c = torch.tensor([-inf, 1.0, 1.0, 1.0, 1.0, 1.0])
    expected = torch.tensor([nan, nan, nan, nan, -inf, inf])
    assert torch.equal(int8.fma(a, b, c).nan_to_num(7.0), expected.nan_to_num(7.0))


def test_tree16_adds_halves() -> None:
    big = torch.zeros(16)
    big[0], big[8], big[1] = 2.0**24, -(2.0**24), 1.0
    assert int8.tree16(big) == 1.0  # 0 and 8 meet first
    big[[1, 9]] = big[[9, 1]]
    assert int8.tree16(torch.stack([big, 2 * big])).tolist() == [1.0, 2.0]
    assert int8.tree16(torch.tensor([2.0**24, 1.0, *[0.0] * 6, *[0.0] * 8]) * 1.0).item() == 2.0**24


def test_exp_is_near_e_to_the_x_and_never_falls() -> None:
    x = torch.linspace(-86, 88, 500_001)
    found = int8.exp(x)
    assert (found.double() / torch.exp(x.double()) - 1).abs().max() < 1.2e-7
    near = torch.tensor([-86.0, 88.0, 0.0, -0.0])
    assert (int8.exp(near) > 0).all() and int8.exp(near)[2:].tolist() == [1.0, 1.0]
    outside = int8.exp(torch.tensor([-86.00001, -math.inf, 88.00001, math.inf, math.nan]))
    assert outside[:4].tolist() == [0.0, 0.0, math.inf, math.inf] and outside[4].isnan()


@pytest.mark.parametrize("size", [16, 48, 576])
def test_norm_and_gate_are_what_they_are_called(size: int) -> None:
    x, gain = pattern((5, 2 * size), 1) * 3, pattern((size,), 2)
    normed = functional.rms_norm(x[:, :size], (size,), gain, 1e-5)
    torch.testing.assert_close(int8.rms_norm(x[:, :size], gain, 1e-5), normed, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(int8.silu_gate(x), functional.silu(x[:, :size]) * x[:, size:], rtol=1e-6, atol=1e-7)


def test_the_norm_of_each_head() -> None:
    x, gain = pattern((3, 4, 32), 1), pattern((32,), 2)
    assert torch.equal(int8.rms_norm(x, gain, 1e-6)[2, 3], int8.rms_norm(x[2, 3:], gain, 1e-6)[0])


def test_quantised_rows() -> None:
    x = pattern((3, 96), 3)
    x[0, :32] = 0.0
    x[0, 32:64] = 2.0**-101
    x[1, 5], x[1, 40], x[2, 0] = math.nan, -math.inf, 3.4e38
    values, scales, sums = int8.quantise(x)
    assert scales[0, :2].tolist() == [0.0, 0.0] and scales[1, :2].isnan().all()
    assert not values[0, :64].any() and not values[1, :64].any()
    assert sums[1, :2].isnan().all() and values[2, 0] == 127 and not values[2, 1:32].any()
    back = (values.float().unflatten(1, (3, 32)) * scales[..., None]).flatten(1)
    ordinary = torch.tensor([[False, False, True], [False, False, True], [False, True, True]]).repeat_interleave(32, 1)
    assert (back - x)[ordinary].abs().max() < 0.51 / 127
    assert torch.equal(sums[2], scales[2] * values[2].view(3, 32).sum(1).float())


def weight_of(kind: str, outputs: int, inputs: int, order: Tensor | None = None) -> tuple[QuantisedWeight, Tensor]:
    """And its values, `[N, K] float32`, as the `gguf` package makes them."""
    blocks = quantize(pattern((outputs, inputs), 4).numpy(), GGMLQuantizationType[kind])
    values = torch.from_numpy(dequantize(blocks, GGMLQuantizationType[kind]))
    return QuantisedWeight(kind, torch.from_numpy(blocks), order), values if order is None else values[order]


@pytest.mark.parametrize("kind", FORMATS)
def test_weights_mean_what_gguf_means(kind: str) -> None:
    order = torch.arange(24).flip(0)
    weight, values = weight_of(kind, 24, 96, order)
    ids = torch.tensor([3, 23, 3, 0])
    assert torch.equal(int8.embedding_rows(weight, ids), values[ids])
    assert (weight.outputs, weight.inputs, weight.num_blocks) == (24, 96, 3)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_product_is_near_that_of_the_values(kind: str) -> None:
    weight, values = weight_of(kind, 40, 128)
    x, bias = pattern((7, 128), 5), pattern((40,), 6)
    rows = int8.quantise(x)
    rounded_x = (rows.values.float().unflatten(1, (-1, 32)) * rows.scales[..., None]).flatten(1)
    expected = (rounded_x.double() @ values.double().T + bias).float()
    torch.testing.assert_close(int8.linear(x, weight, bias), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_row_of_a_product_is_its_own(kind: str) -> None:
    weight, _ = weight_of(kind, 72, 96)
    x = pattern((9, 96), 7)
    x[4, 50] = math.nan
    together = int8.linear(x, weight)
    alone = torch.cat([int8.linear(row[None], weight) for row in x])
    assert torch.equal(together.nan_to_num(9.0), alone.nan_to_num(9.0))
    assert together[4].isnan().all() and together[[0, 1, 2, 3, 5, 6, 7, 8]].isfinite().all()


def test_broken_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="Q5_K"):
        QuantisedWeight("Q5_K", torch.zeros(2, 36, dtype=torch.uint8))
    for blocks in (torch.zeros(2, 35, dtype=torch.uint8), torch.zeros(2, 36), torch.zeros(2, 0, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="block"):
            QuantisedWeight("Q4_0", blocks)
    with pytest.raises(ValueError, match="order"):
        QuantisedWeight("Q4_0", torch.zeros(2, 36, dtype=torch.uint8), torch.tensor([0]))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=8, max_size=8),
    st.sampled_from(list(LEVELS.values())),
)
@example([2.0**-149] * 8, 127)
@example([2.0**-132] * 8, 7)
def test_whole_numbers_are_those_of_the_round_trip(values: list[float], levels: int) -> None:
    x = torch.tensor([values])
    whole, scale = whole_and_scale(x, levels)
    assert torch.equal(whole.float() * scale[..., None], round_trip(x.clone(), levels, torch.float32))
    assert not (whole[scale == 0]).any()


def test_what_is_not_finite_has_no_scale() -> None:
    x = torch.ones(3, 8)
    x[0, 2], x[1, 3] = math.nan, -math.inf
    whole, scale = whole_and_scale(x, 127)
    assert not whole[:2].any() and scale[:2].isnan().all() and scale[2] > 0


LENGTH, HEADS, KV_HEADS, DIM = 150, 6, 2, 32


def in_pages(page_tokens: int, quantisation: str, cuts: list[int], *, garbage: int = 255) -> Tensor:
    """A sequence attending in spans of `cuts` rows, over pages that hold `garbage` elsewhere."""
    form = PageForm(2, KV_HEADS, page_tokens, DIM, quantisation=quantisation)
    num_pages = -(-LENGTH // page_tokens)
    pool = form.empty_pool(num_pages + 2)
    pool.view(torch.uint8).fill_(garbage)
    kv, queries = pattern((LENGTH, 2 * KV_HEADS, DIM), 1), pattern((LENGTH, HEADS, DIM), 2) * 4
    pages, out = list(range(num_pages, 0, -1)), []
    for rows in cuts:
        start = sum(len(done) for done in out)
        span = Rows(start, rows, pages)
        int8.write_kv(pool, 1, kv[start : start + rows], [span], form)
        out.append(int8.attend(pool, 1, queries[start : start + rows], [span], form))
    return torch.cat(out)


@pytest.mark.parametrize("quantisation", ["none", *LEVELS])
def test_attention_does_not_depend_on_pages_or_passes(quantisation: str) -> None:
    whole = in_pages(64, quantisation, [LENGTH])
    assert whole.isfinite().all()
    for page_tokens, cuts, garbage in ((16, [LENGTH], 255), (32, [64, 86], 0), (128, [63, 1, 1, 85], 255)):
        assert torch.equal(in_pages(page_tokens, quantisation, cuts, garbage=garbage), whole)


@pytest.mark.parametrize(("quantisation", "tolerance"), [("none", 0.02), ("int8", 0.03), ("int4", 0.4)])
def test_attention_is_attention(quantisation: str, tolerance: float) -> None:
    kv, queries = pattern((LENGTH, 2, KV_HEADS, DIM), 1), pattern((LENGTH, HEADS, DIM), 2) * 4
    keys, values = kv.repeat_interleave(HEADS // KV_HEADS, 2).permute(1, 2, 0, 3)
    expected = functional.scaled_dot_product_attention(queries.transpose(0, 1), keys, values, is_causal=True)
    found = in_pages(64, quantisation, [LENGTH])
    assert (found - expected.transpose(0, 1).flatten(1)).abs().max() < tolerance


def test_sequences_of_a_pass_do_not_see_each_other() -> None:
    form = PageForm(1, KV_HEADS, 16, DIM)
    pool, alone = form.empty_pool(6).fill_(math.nan), form.empty_pool(6).fill_(math.nan)
    kv, queries = pattern((50, 2 * KV_HEADS, DIM), 3), pattern((50, HEADS, DIM), 4)
    spans = [Rows(0, 30, [4, 1]), Rows(0, 0, []), Rows(0, 20, [0, 3])]
    int8.write_kv(pool, 0, kv, spans, form)
    together = int8.attend(pool, 0, queries, spans, form)
    int8.write_kv(alone, 0, kv[30:], spans[2:], form)
    assert torch.equal(int8.attend(alone, 0, queries[30:], spans[2:], form), together[30:])


def test_a_page_is_as_large_as_it_says() -> None:
    for quantisation, value_bytes in (("none", 64), ("int8", 32 + 4), ("int4", 16 + 4)):
        form = PageForm(3, KV_HEADS, 16, DIM, quantisation=quantisation)
        pool = form.empty_pool(2)
        assert form.fits(pool) and not form.fits(pool[:, :2])
        assert pool[0].nbytes == form.page_bytes == 3 * 2 * KV_HEADS * 16 * value_bytes


def test_a_nan_in_a_key_reaches_rows_that_see_it_only() -> None:
    form = PageForm(1, KV_HEADS, 16, DIM, quantisation="int8")
    pool = form.empty_pool(5)
    kv = pattern((80, 2 * KV_HEADS, DIM), 5)
    kv[40, 0, 3] = math.nan
    span = Rows(0, 80, [0, 1, 2, 3, 4])
    int8.write_kv(pool, 0, kv, [span], form)
    out = int8.attend(pool, 0, pattern((80, HEADS, DIM), 6), [span], form).view(80, HEADS, DIM)
    hit = np.zeros((80, HEADS), bool)
    hit[40:, : HEADS // KV_HEADS] = True
    assert np.array_equal(out.isnan().any(-1).numpy(), hit) and np.array_equal(out.isnan().all(-1).numpy(), hit)
