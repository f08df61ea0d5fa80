"""Attention and appending in C++ against their definition: pages of all sizes and forms, shared ones, many threads."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.native import ops
from kernels.page_form import PageForm
from kernels.reference import int8
from tests.kernels.native.bits import numbers, same
from tests.kernels.native.test_operations import pairs_first

QUANTISATIONS = ("none", "int8", "int4")
some = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@dataclass(frozen=True)
class Rows:
    start: int
    rows: int
    pages: list[int]


@dataclass(frozen=True)
class Case:
    """Sequences of which the first `shared` pages are the same, and the rows of each that attend."""

    form: PageForm
    heads: int
    spans: list[Rows]
    num_pages: int
    kind: str
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    page_tokens = draw(st.sampled_from([16, 32, 64, 128]))
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 4), (2, 3), (3, 3), (2, 1)]))
    dim = draw(st.sampled_from([16, 32, 64, 80, 128]))
    form = PageForm(
        draw(st.integers(1, 2)), kv_heads, page_tokens, dim, quantisation=draw(st.sampled_from(QUANTISATIONS))
    )
    ends = st.one_of(st.integers(1, 200), st.sampled_from([63, 64, 65, 127, 128, 129, 192]))
    lengths = draw(st.lists(ends, min_size=1, max_size=6))
    rows = [draw(st.sampled_from([1, 1, 2, 5, 8, 17, length])) for length in lengths]
    rows = [min(count, length) for count, length in zip(rows, lengths, strict=True)]
    # A page is shared where none of its holders writes to it.
    shared = min((length - count) // page_tokens for length, count in zip(lengths, rows, strict=True))
    shared = draw(st.integers(0, shared))
    needed = [-(-length // page_tokens) - shared for length in lengths]
    seed = draw(st.integers(0, 2**32 - 1))
    free = np.random.default_rng(seed).permutation(shared + sum(needed) + 1).tolist()
    common, spans = [free.pop() for _ in range(shared)], []
    for length, count, own in zip(lengths, rows, needed, strict=True):
        spans.append(Rows(length - count, count, [*common, *(free.pop() for _ in range(own))]))
    kind = draw(st.sampled_from(["usual", "usual", "all sizes", "huge", "denormal", "zeros", "few not finite"]))
    return Case(form, kv_heads * group, spans, shared + sum(needed) + 1, kind, seed)


def filled(case: Case) -> Tensor:
    """A pool with K and V of every sequence up to its end, and NaN wherever nobody wrote."""
    pool = case.form.empty_pool(case.num_pages)
    pool.view(torch.uint8).fill_(255)
    for layer in range(case.form.layers):
        for number, span in enumerate(case.spans):
            end = span.start + span.rows
            kv = numbers((end, 2 * case.form.kv_heads, case.form.head_dim), case.kind, case.seed + number + 10 * layer)
            int8.write_kv(pool, layer, kv, [Rows(0, end, span.pages)], case.form)
    return pool


def queries_of(case: Case) -> Tensor:
    return numbers((sum(span.rows for span in case.spans), case.heads, case.form.head_dim), "usual", case.seed) * 3


@some
@given(cases(), st.sampled_from([1, 2]))
def test_attend(isa: str, case: Case, threads: int) -> None:
    pool, queries, layer = filled(case), queries_of(case), case.form.layers - 1
    expected = int8.attend(pool, layer, queries, case.spans, case.form)
    assert same(ops.attend(pool, layer, queries, case.spans, case.form, threads, isa), expected)


@some
@given(cases())
def test_write_kv(isa: str, case: Case) -> None:
    """Every byte of the pool, also of those pages and slots that were not to be written."""
    expected, found = filled(case), filled(case)
    total = sum(span.rows for span in case.spans)
    kv = numbers((total, 2 * case.form.kv_heads, case.form.head_dim), case.kind, case.seed + 99)
    int8.write_kv(expected, 0, kv, case.spans, case.form)
    ops.write_kv(found, 0, kv, case.spans, case.form, isa)
    if not case.form.is_quantised:
        assert same(found, expected)
    else:
        assert torch.equal(case.form.values(found), case.form.values(expected))
        assert same(case.form.scales(found), case.form.scales(expected))


@pytest.mark.parametrize("quantisation", QUANTISATIONS)
def test_another_order_of_additions_is_seen(isa: str, quantisation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(PageForm(1, 2, 32, 64, quantisation=quantisation), 4, [Rows(90, 40, [2, 0, 1, 3, 4])], 6, "usual", 5)
    pool, queries = filled(case), queries_of(case)
    found = ops.attend(pool, 0, queries, case.spans, case.form, isa=isa)
    assert same(found, int8.attend(pool, 0, queries, case.spans, case.form))
    monkeypatch.setattr("kernels.reference.int8.attention.tree16", pairs_first)
    assert not same(found, int8.attend(pool, 0, queries, case.spans, case.form))
