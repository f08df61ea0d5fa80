"""The operations in C++ give the bits of their definition, on each instruction set, for numbers of any size."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.native import ops
from kernels.quantised_weight import BLOCK_BYTES, QuantisedWeight
from kernels.reference import int8
from kernels.reference.rope import rotate_
from tests.kernels.native.bits import kinds, numbers, same, seeds

many = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

rows = st.one_of(st.integers(0, 9), st.sampled_from([16, 33, 64]))
groups = st.one_of(st.integers(1, 5), st.sampled_from([18, 48]))
formats = st.sampled_from(sorted(BLOCK_BYTES))


def weight(format: str, outputs: int, groups: int, seed: int, *, any_scale: bool = False) -> QuantisedWeight:
    """Any whole numbers; scales of usual sizes, or of any bits at all: denormal, infinite, NaN."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (outputs, groups, BLOCK_BYTES[format]), np.uint8)
    if not any_scale:
        halves = 2 if format == "Q4_1" else 1
        scales = rng.standard_normal((outputs, groups, halves)) * 10.0 ** rng.integers(-6, 2, (outputs, groups, halves))
        blocks[..., : 2 * halves] = scales.astype(np.float16).view(np.uint8)
    order = torch.from_numpy(rng.permutation(outputs)) if seed % 2 else None
    return QuantisedWeight(format, torch.from_numpy(blocks.reshape(outputs, -1)), order)


@many
@given(st.integers(1, 300), kinds, seeds)
def test_exp(isa: str, count: int, kind: str, seed: int) -> None:
    x = numbers((count,), kind, seed)
    assert same(ops.exp(x, isa), int8.exp(x))


def test_exp_of_every_size(isa: str) -> None:
    """Every 4,099th of all bit patterns, and all those around where it switches."""
    bits = np.arange(0, 2**32, 4099, np.uint64).astype(np.uint32).view(np.float32)
    edges = [np.float32(edge).view(np.int32) for edge in (-86, 88, 88.5, -87.5, 1e-38)]
    near = np.concatenate([np.arange(edge - 500, edge + 500, dtype=np.int32) for edge in edges]).view(np.float32)
    x = torch.from_numpy(np.concatenate([bits, near]))
    assert same(ops.exp(x, isa), int8.exp(x))


@many
@given(rows, st.integers(1, 40), kinds, kinds, seeds)
def test_rms_norm(isa: str, rows: int, sixteens: int, kind: str, gain: str, seed: int) -> None:
    x, w = numbers((rows, 16 * sixteens), kind, seed), numbers((16 * sixteens,), gain, seed + 1)
    for eps in (1e-5, 0.0):
        assert same(ops.rms_norm(x, w, eps, isa), int8.rms_norm(x, w, eps))


@many
@given(rows, st.integers(1, 12), kinds, seeds)
def test_silu_gate(isa: str, rows: int, sixteens: int, kind: str, seed: int) -> None:
    x = numbers((rows, 32 * sixteens), kind, seed)
    assert same(ops.silu_gate(x, isa), int8.silu_gate(x))


@many
@given(rows, groups, kinds, seeds)
def test_quantise(isa: str, rows: int, groups: int, kind: str, seed: int) -> None:
    x = numbers((rows, 32 * groups), kind, seed)
    for found, expected in zip(ops.quantise(x, isa), int8.quantise(x), strict=True):
        assert same(found, expected)


def test_quantise_rounds_ties_to_even(isa: str) -> None:
    x = torch.arange(-127, 128).float().add(0.5).clamp(-127, 127)
    x = torch.cat([x, torch.zeros(1)]).view(1, 256)
    x[:, ::32] = 127.0  # so that a step is 1
    assert same(ops.quantise(x, isa).values, int8.quantise(x).values)
    assert {0, 2, -2, 126} <= set(ops.quantise(x, isa).values.flatten().tolist())


@many
@given(rows, st.one_of(st.integers(1, 50), st.sampled_from([64, 96, 97])), groups, formats, kinds, seeds, st.booleans())
def test_linear(isa: str, rows: int, outputs: int, groups: int, format: str, kind: str, seed: int, odd: bool) -> None:
    w = weight(format, outputs, groups, seed, any_scale=odd)
    x, bias = numbers((rows, 32 * groups), kind, seed + 1), numbers((outputs,), "usual", seed + 2)
    for added in (None, bias):
        assert same(ops.linear(x, w, added, isa), int8.linear(x, w, added))


@pytest.mark.parametrize("format", BLOCK_BYTES)
def test_linear_of_the_largest_numbers(isa: str, format: str) -> None:
    """Where a sum in int16 or in an unsigned times signed instruction would saturate."""
    for byte in (0x00, 0x7F, 0x80, 0x88, 0xFF):
        blocks = torch.full((32, 2, BLOCK_BYTES[format]), byte, dtype=torch.uint8)
        blocks[..., :2] = torch.tensor([0x00, 0x3C], dtype=torch.uint8)  # 1.0
        w = QuantisedWeight(format, blocks.flatten(1))
        for value in (1.0, -1.0):
            x = torch.full((17, 64), value)
            assert same(ops.linear(x, w, isa=isa), int8.linear(x, w))


@many
@given(st.integers(1, 40), groups, formats, seeds, st.booleans())
def test_embedding_rows(isa: str, outputs: int, groups: int, format: str, seed: int, odd: bool) -> None:
    w = weight(format, outputs, groups, seed, any_scale=odd)
    ids = torch.from_numpy(np.random.default_rng(seed).integers(0, outputs, 7))
    assert same(ops.embedding_rows(w, ids, isa), int8.embedding_rows(w, ids))


@many
@given(rows, st.integers(1, 5), st.integers(1, 8), kinds, seeds)
def test_rotate(isa: str, rows: int, heads: int, sixteens: int, kind: str, seed: int) -> None:
    dim = 16 * sixteens
    x = numbers((rows, heads, dim), kind, seed)
    cos, sin = numbers((rows, 1, dim), "usual", seed + 1), numbers((rows, 1, dim), "usual", seed + 2)
    found, expected = x.clone(), x.clone()
    ops.rotate_(found, cos, sin, isa)
    rotate_(expected, cos, sin)
    assert same(found, expected)


def pairs_first(v: Tensor) -> Tensor:
    """Another order of the same additions."""
    while v.shape[-1] > 1:
        v = v[..., 0::2] + v[..., 1::2]
    return v[..., 0]


def test_another_order_of_additions_is_seen(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = numbers((64, 576), "usual", 1), numbers((576,), "usual", 2)
    assert same(ops.rms_norm(x, w, 1e-5, isa), int8.rms_norm(x, w, 1e-5))
    monkeypatch.setattr("kernels.reference.int8.norm.tree16", pairs_first)
    assert not same(ops.rms_norm(x, w, 1e-5, isa), int8.rms_norm(x, w, 1e-5))


def test_another_order_of_groups_is_seen(isa: str) -> None:
    w = weight("Q4_1", 32, 18, 2)
    x = numbers((3, 576), "usual", 3)
    blocks, grouped = w.blocks.view(32, 18, -1).flip(1), x.view(3, 18, 32).flip(1)
    backwards = QuantisedWeight("Q4_1", blocks.reshape(32, -1).contiguous())
    assert same(ops.linear(x, w, isa=isa), int8.linear(x, w))
    assert not same(ops.linear(x, w, isa=isa), int8.linear(grouped.reshape(3, -1).contiguous(), backwards))
