"""Attention over pages: right, exact, and deaf to what lies in slots that are not its own."""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.exactness import pattern, threads
from kernels.paging import PoolGeometry, plan_pass, scrub_tails
from kernels.reference.attention import attend, write_kv

LAYERS, KV_HEADS, HEADS, DIM = 2, 2, 6, 16
LENGTH = 150


@dataclass(frozen=True)
class Rows:
    start: int
    rows: int
    pages: list[int]


def inputs(seed: int, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Queries `[R, heads, D]` and K, V `[R, 2 * H, D]` of one sequence."""
    return pattern((length, HEADS, DIM), seed) * 4, pattern((length, 2 * KV_HEADS, DIM), seed + 1)


def geometry(page_tokens: int) -> PoolGeometry:
    return PoolGeometry(LAYERS, KV_HEADS, page_tokens, DIM, HEADS)


def new_pool(page_tokens: int, num_pages: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Full of NaN: whatever is read without having been written shows."""
    return torch.full((num_pages, LAYERS, 2, KV_HEADS, page_tokens, DIM), math.nan, dtype=dtype)


def run(pool: Tensor, layer: int, spans: list[Rows], queries: Tensor, kv: Tensor) -> Tensor:
    plan = plan_pass(spans, geometry(pool.shape[4]))
    scrub_tails(spans, pool)
    write_kv(pool, layer, kv, plan)
    return attend(pool, layer, queries, plan)


def reference(page_tokens: int = 64, dtype: torch.dtype = torch.float32) -> Tensor:
    pages = list(range(-(-LENGTH // page_tokens)))
    return run(new_pool(page_tokens, len(pages), dtype), 1, [Rows(0, LENGTH, pages)], *inputs(1))


def test_like_the_formula() -> None:
    queries, kv = inputs(1)
    keys, values = (part.repeat_interleave(HEADS // KV_HEADS, dim=1).double() for part in kv.chunk(2, dim=1))
    scores = torch.einsum("qhd,khd->hqk", queries.double(), keys) / math.sqrt(DIM)
    hidden = torch.ones(LENGTH, LENGTH).triu(1).bool()
    expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), values)
    torch.testing.assert_close(reference(), expected.flatten(1).float(), atol=1e-5, rtol=1e-5)


@settings(max_examples=30, deadline=None)
@given(
    page_tokens=st.sampled_from([16, 48, 64, 128]),
    cuts=st.lists(st.integers(1, LENGTH - 1), max_size=5, unique=True).map(sorted),
    mate=st.integers(0, 100),
    num_threads=st.integers(1, 2),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_rows_depend_on_nothing_else(
    page_tokens: int, cuts: list[int], mate: int, num_threads: int, dtype: torch.dtype
) -> None:
    """Any cut into passes, any page size and order of pages, alone or beside a mate with a NaN in its K and V."""
    queries, kv = inputs(1)
    mate_queries, mate_kv = inputs(7, mate)
    mate_kv[mate // 2 : mate // 2 + 1] = math.nan
    own, others = -(-LENGTH // page_tokens), -(-mate // page_tokens)
    pool = new_pool(page_tokens, own + others, dtype)
    pages, mate_pages = list(range(own))[::-1], list(range(own, own + others))
    out = []
    with threads(num_threads):
        for start, end in zip([0, *cuts], [*cuts, LENGTH], strict=True):
            spans = [Rows(0, mate, mate_pages), Rows(start, end - start, pages)]
            both = torch.cat([mate_queries, queries[start:end]]), torch.cat([mate_kv, kv[start:end]])
            out.append(run(pool, 1, spans, *both)[mate:])
    assert torch.equal(torch.cat(out), reference(dtype=dtype))


def test_a_decode_batch_of_all_lengths() -> None:
    """Every row of the sequence once more, as single rows of one pass over the same pages, in mixed order."""
    queries, kv = inputs(1)
    pages = [2, 0, 1]
    pool = new_pool(64, 3)
    run(pool, 1, [Rows(0, LENGTH, pages)], queries, kv)
    order = [(row * 37) % LENGTH for row in range(LENGTH)]
    plan = plan_pass([Rows(row, 1, pages) for row in order], geometry(64))
    assert torch.equal(attend(pool, 1, queries[order], plan), reference()[order])


def test_writes_only_its_own_slots_of_its_layer() -> None:
    pool = new_pool(16, 4).fill_(5.0)
    queries, kv = inputs(1, 20)
    run(pool, 1, [Rows(0, 20, [3, 1])], queries, kv)
    assert (pool[:, 0, 0] == 5).all() and (pool[[0, 2]] == 5).all()
    tokens = torch.cat([pool[3, 1], pool[1, 1]], dim=2)[:, :, :20]  # [2, H, 20, D]
    assert torch.equal(tokens.permute(2, 0, 1, 3).flatten(1, 2), kv)


def test_a_long_context() -> None:
    """Enough keys for many tiles and for sums of more than sixteen blocks; decoded beside other lengths."""
    length = 2200
    queries, kv = inputs(1, length)
    pages = [(number * 17) % 35 for number in range(35)]
    pool = new_pool(64, 35)
    whole = run(pool, 1, [Rows(0, length, pages)], queries, kv)
    chunks = [
        run(pool, 1, [Rows(start, end - start, pages)], queries[start:end], kv[start:end])
        for start, end in pairwise([0, 16, 1024, 1280, 2128, length])
    ]
    assert torch.equal(torch.cat(chunks), whole)
    rows = [2199, 0, 1023, 1024, 63, 2111, 1100]
    plan = plan_pass([Rows(row, 1, pages) for row in rows], geometry(64))
    assert torch.equal(attend(pool, 1, queries[rows], plan), whole[rows])
