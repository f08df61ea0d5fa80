"""Does a row of a result depend on the rows beside it, or on the threads? Tried out on this machine, at start.

Nothing documents which matrix kernel a library picks for how many rows, so it is measured on the shapes at hand. What
the operations gave is part of the answer: its digest tells two machines of different bits apart.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.arithmetic import Shapes
from kernels.linear import LinearRecipe
from kernels.paging import PoolGeometry, plan_pass
from kernels.reference.attention import attend
from kernels.reference.gate import silu_gate
from kernels.reference.norm import rms_norm

ROWS = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 100, 256)
"""Row counts on both sides of what kernels are known to switch at."""

MAX_WEIGHTS = 1 << 21
"""Weights of one product tried out: outputs beyond are left away, for a sum runs along the inputs."""

RowFunction = Callable[[Tensor], Tensor]
"""`[R, K] -> [R, N]`, meant to treat each row by itself."""


@dataclass(frozen=True)
class Verdict:
    """`faults` names what was not exact, empty if nothing; `digest` covers the bits of every result."""

    faults: tuple[str, ...]
    digest: bytes


def try_out(recipe: LinearRecipe, head_recipe: LinearRecipe, shapes: Shapes, dtype: torch.dtype) -> Verdict:
    """The operations of a forward pass with these recipes, at the threads of this process and at one."""
    faults: list[str] = []
    digest = hashlib.blake2b(digest_size=16)
    for name, function, inputs in _row_functions(recipe, head_recipe, shapes, dtype):
        faults += [f"{name}: {fault}" for fault in inexact_rows(function, inputs)]
        with threads(1):
            digest.update(function(inputs[:64]).contiguous().numpy().tobytes())
    fault, attended = try_attention(shapes, dtype)
    digest.update(attended.numpy().tobytes())
    return Verdict(tuple(faults) + fault, digest.digest())


def inexact_rows(function: RowFunction, inputs: Tensor, row_counts: Sequence[int] = ROWS) -> list[str]:
    """Where rows of `function` differ from what all of `inputs: [R, K]` gave in one call with one thread."""
    with threads(1):
        expected = function(inputs)
    found = []
    for count in {1, torch.get_num_threads()}:
        with threads(count):
            for rows in [n for n in row_counts if n <= inputs.shape[0]]:
                # The first rows and the last ones: a row's place must not matter either.
                first, last = function(inputs[:rows]), function(inputs[-rows:])
                if not (torch.equal(first, expected[:rows]) and torch.equal(last, expected[-rows:])):
                    found.append(f"{rows} rows, {count} threads")
    return found


def try_attention(shapes: Shapes, dtype: torch.dtype) -> tuple[tuple[str, ...], Tensor]:
    """Rows of a prompt attending together, in chunks, and one by one, over pages of 16 and of 64 tokens."""
    length, results = 200, []
    queries = pattern((length, shapes.heads, shapes.head_dim), 11)
    for page_tokens, cuts, count in ((64, [length], 1), (64, [length], torch.get_num_threads()), (16, [16, 96, 88], 1)):
        with threads(count):
            results.append(_attend_in_spans(queries, shapes, dtype, page_tokens, cuts))
    with threads(torch.get_num_threads()):
        results.append(_attend_in_spans(queries, shapes, dtype, 64, [63, *[1] * 3, length - 66]))
    faults = tuple(
        f"attention: variant {number}" for number, result in enumerate(results) if not torch.equal(result, results[0])
    )
    return faults, results[0]


@dataclass(frozen=True)
class _Span:
    start: int
    rows: int
    pages: Sequence[int]


def _attend_in_spans(queries: Tensor, shapes: Shapes, dtype: torch.dtype, page_tokens: int, cuts: list[int]) -> Tensor:
    """All rows, the sequence cut into passes' spans of `cuts` rows, over the same K and V in pages of `page_tokens`."""
    length = queries.shape[0]
    num_pages = math.ceil(length / page_tokens)
    kv = pattern((num_pages * page_tokens, 2, shapes.kv_heads, shapes.head_dim), 12)
    pool = kv.view(num_pages, 1, page_tokens, 2, shapes.kv_heads, shapes.head_dim).permute(0, 1, 3, 4, 2, 5)
    pool = pool.to(dtype).contiguous()
    geometry = PoolGeometry(1, shapes.kv_heads, page_tokens, shapes.head_dim, shapes.heads)
    starts = [sum(cuts[:number]) for number in range(len(cuts))]
    spans = [_Span(start, rows, range(num_pages)) for start, rows in zip(starts, cuts, strict=True)]
    return attend(pool, 0, queries, plan_pass(spans, geometry))


def _row_functions(
    recipe: LinearRecipe, head_recipe: LinearRecipe, shapes: Shapes, dtype: torch.dtype
) -> Iterator[tuple[str, RowFunction, Tensor]]:
    products = [(recipe, shape) for shape in shapes.linears] + [(head_recipe, shapes.head)]
    for number, (product, (outputs, inputs)) in enumerate(dict.fromkeys(products)):
        tried = min(outputs, max(64, MAX_WEIGHTS // inputs // 64 * 64))
        weight = pattern((tried, inputs), number).to(dtype).float()
        rows = pattern((max(ROWS), inputs), 100 + number).to(dtype).float()
        yield f"{product.name} {tried}x{inputs}", product.pack(weight), rows
    hidden, doubled = shapes.head[1], shapes.linears[2][0]
    gain = pattern((hidden,), 9)
    yield "rms_norm", lambda x: rms_norm(x, gain, 1e-5), pattern((max(ROWS), hidden), 8)
    yield "silu_gate", silu_gate, pattern((max(ROWS), doubled), 10) * 8


def pattern(shape: tuple[int, ...], seed: int) -> Tensor:
    """float32 in [-1, 1): the same on every machine, which torch's generators do not promise (64-bit LCG, top bits)."""
    index = torch.arange(math.prod(shape), dtype=torch.int64) + seed * 1_000_003
    mixed = index * 6364136223846793005 + 1442695040888963407
    mixed = (mixed ^ (mixed >> 29)) * 2685821657736338717
    return ((mixed >> 40) & 0xFFFFFF).float().sub_(1 << 23).div_(1 << 23).view(shape)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """torch's intra-op threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
