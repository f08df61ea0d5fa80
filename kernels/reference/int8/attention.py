"""Attention over a paged KV pool in fixed blocks of 64 keys, every sum in an order of its own.

Of each row and head: in each block, at absolute multiples of 64, the largest score, the weights relative to it, their
sum and the weighted values; then the blocks one after the other, relative to the largest of all. A row sees the keys up
to its own position; others are in no sum.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.page_form import PageForm
from kernels.paging import BLOCK_KEYS, SpanLike
from kernels.quantise import LEVELS, whole_and_scale
from kernels.reference.int8.elementary import exp, fma, in_groups, tree16

LANES = 16
_LANES_AT_ONCE = 1 << 21
"""Of the scores of rows that are computed together. Changes no bits."""


def write_kv(pool: Tensor, layer: int, kv: Tensor, spans: Sequence[SpanLike], form: PageForm) -> None:
    """Stores `kv: [R, 2 * H, D] float32` (K heads, then V heads): rounded to bfloat16, or whole numbers and scales."""
    kv = kv.view(kv.shape[0], 2, form.kv_heads, form.head_dim)
    row = 0
    for span in spans:
        positions = torch.arange(span.start, span.start + span.rows)
        pages, slots = (
            torch.tensor(span.pages, dtype=torch.int64)[positions // form.page_tokens],
            positions % form.page_tokens,
        )
        own = kv[row : row + span.rows]
        row += span.rows
        if form.is_quantised:
            whole, scales = whole_and_scale(own, LEVELS[form.quantisation])
            form.values(pool)[:, layer][pages, :, :, slots] = _packed(whole, form)
            form.scales(pool)[:, layer][pages, :, :, slots] = scales
        else:
            pool[:, layer][pages, :, :, slots] = own.to(pool.dtype)


def attend(pool: Tensor, layer: int, queries: Tensor, spans: Sequence[SpanLike], form: PageForm) -> Tensor:
    """`queries: [R, heads, D] float32` against the stored K and V of `layer` -> `[R, heads * D] float32`."""
    out = torch.empty_like(queries)
    row = 0
    for span in spans:
        if not span.rows:
            continue
        (keys, values), scales = _fetch(pool, layer, span, form)
        step = max(1, _LANES_AT_ONCE // (queries.shape[1] * keys.shape[1] * LANES))
        for begin in range(0, span.rows, step):
            count = min(step, span.rows - begin)
            own = slice(row + begin, row + begin + count)
            positions = span.start + torch.arange(begin, begin + count)
            out[own] = _attend_rows(queries[own], positions, keys, values, scales)
        row += span.rows
    return out.flatten(1)


def _packed(whole: Tensor, form: PageForm) -> Tensor:
    """`[..., D] int8` -> the bytes of a page."""
    whole = whole.view(torch.uint8)
    return whole if form.quantisation == "int8" else (whole[..., 0::2] & 15) | (whole[..., 1::2] << 4)


def _unpacked(data: Tensor, form: PageForm) -> Tensor:
    """The bytes of a page -> `[..., D] float32` whole numbers."""
    if form.quantisation == "int8":
        return data.view(torch.int8).float()
    nibbles = torch.stack([data & 15, data >> 4], dim=-1).flatten(-2).to(torch.int8)
    return torch.where(nibbles > 7, nibbles - 16, nibbles).float()


def _fetch(pool: Tensor, layer: int, span: SpanLike, form: PageForm) -> tuple[Tensor, Tensor | None]:
    """K and V, `[2, H, keys, D] float32`, and their scales `[2, H, keys]` if they have any; whole blocks of keys, those
    behind the span being 0."""
    end = span.start + span.rows
    pages = torch.tensor(span.pages[: -(-end // form.page_tokens)], dtype=torch.int64)
    held = form.values(pool) if form.is_quantised else pool
    found = _in_order(held[pages, layer], end)
    if not form.is_quantised:
        return found.float(), None
    return _unpacked(found, form), _in_order(form.scales(pool)[pages, layer][..., None], end)[..., 0]


def _in_order(paged: Tensor, end: int) -> Tensor:
    """`[pages, 2, H, T, n]` -> `[2, H, keys, n]`."""
    pages, both, heads, tokens, width = paged.shape
    blocks = -(-end // BLOCK_KEYS)
    out = paged.new_zeros(both, heads, blocks * BLOCK_KEYS, width)
    out[:, :, :end] = paged.permute(1, 2, 0, 3, 4).reshape(both, heads, pages * tokens, width)[:, :, :end]
    return out


def _attend_rows(queries: Tensor, positions: Tensor, keys: Tensor, values: Tensor, scales: Tensor | None) -> Tensor:
    """`queries: [r, heads, D]` of one sequence at `positions: [r]`; `keys`, `values`: `[H, S, D]` -> like `queries`."""
    rows, heads, dim = queries.shape
    kv_heads, num_keys, _ = keys.shape
    q = (queries * (1 / math.sqrt(dim))).view(rows, kv_heads, heads // kv_heads, dim)
    seen = (torch.arange(num_keys) <= positions[:, None]).view(rows, 1, 1, -1, BLOCK_KEYS)
    scores = _scores(q, keys)
    if scales is not None:
        scores = scores * scales[0][:, None]
    scores = in_groups(scores, BLOCK_KEYS).masked_fill(~seen, -math.inf)  # [r, H, G, blocks, 64]
    largest = scores.amax(-1)
    weights = exp(scores - largest[..., None]).masked_fill(~seen, 0.0)
    sums = _lane_sums(weights)
    if scales is not None:
        weights = weights * scales[1].view(kv_heads, 1, -1, BLOCK_KEYS)
    blocks = _weighted(weights, values, seen)
    return _joined(largest, sums, blocks, seen[..., 0]).reshape(rows, heads, dim)


def _scores(q: Tensor, keys: Tensor) -> Tensor:
    """`q: [r, H, G, D]`, `keys: [H, S, D]` -> `[r, H, G, S]`; lane l sums dims l, l + 16, ..."""
    lanes = q.new_zeros(*q.shape[:3], keys.shape[1], LANES)
    for begin in range(0, q.shape[-1], LANES):
        part = slice(begin, begin + LANES)
        lanes = fma(q[..., None, part], keys[:, None, :, part], lanes)
    return tree16(lanes)


def _lane_sums(weights: Tensor) -> Tensor:
    """`[..., 64] -> [...]`; lane l sums keys l, l + 16, ..."""
    lanes = in_groups(weights, LANES)
    total = lanes[..., 0, :]
    for step in range(1, lanes.shape[-2]):
        total = total + lanes[..., step, :]
    return tree16(total)


def _weighted(weights: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """`weights: [r, H, G, blocks, 64]`, `values: [H, S, D]` -> the sums of each block `[r, H, G, blocks, D]`."""
    by_block = values.view(values.shape[0], 1, -1, BLOCK_KEYS, values.shape[-1])
    total = weights.new_zeros(*weights.shape[:-1], values.shape[-1])
    for key in range(BLOCK_KEYS):
        more = fma(weights[..., key, None], by_block[..., key, :], total)
        total = torch.where(seen[..., key, None], more, total)
    return total


def _joined(largest: Tensor, sums: Tensor, blocks: Tensor, seen: Tensor) -> Tensor:
    """`largest`, `sums`: `[r, H, G, blocks]`, `blocks: [r, H, G, blocks, D]` -> `[r, H, G, D]`."""
    factors = exp(largest - largest.amax(-1, keepdim=True))
    total, out = torch.zeros_like(sums[..., 0]), torch.zeros_like(blocks[..., 0, :])
    for block in range(sums.shape[-1]):
        factor, is_seen = factors[..., block], seen[..., block]
        total = torch.where(is_seen, fma(factor, sums[..., block], total), total)
        out = torch.where(is_seen[..., None], fma(factor[..., None], blocks[..., block, :], out), out)
    return out * (1.0 / total)[..., None]
