"""Where a pass's rows lie in the paged KV pool: indices worked out once a pass, used by every layer.

The pool is one contiguous tensor `[P, L, 2, H, T, D]` (2: K, V). Attention reads it as blocks of 64 keys at absolute
positions that are multiples of 64, whatever T is, in units of gcd(T, 64) tokens: a unit is the largest run of
one head's tokens that lies in one piece in a page and inside one block.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

BLOCK_KEYS = 64
"""Keys whose sums are made together. Part of the arithmetic: changing it changes bits."""

GROUP_BLOCKS = 32
"""Blocks that one decode gather holds: more falls out of the L2 cache, fewer pays for calls. Changes no bits."""

TILE_SCORES = 1 << 20
"""Scores of one prefill tile at most, a tile being at least 16 rows. Changes no bits."""

ROW_MULTIPLE = 8
"""Query rows of one product are padded to a multiple of this: what float32 `bmm` needs to be exact."""


class SpanLike(Protocol):
    """Rows `[start, start + rows)` of one sequence; `pages` cover the positions `[0, start + rows)`."""

    @property
    def start(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def pages(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class PoolGeometry:
    """L, H, T, D of a pool, and the query heads that read it."""

    layers: int
    kv_heads: int
    page_tokens: int
    head_dim: int
    heads: int

    @property
    def unit_tokens(self) -> int:
        return math.gcd(self.page_tokens, BLOCK_KEYS)

    @property
    def units_per_head(self) -> int:
        return self.page_tokens // self.unit_tokens


@dataclass(frozen=True)
class Tile:
    """Query rows that attend in one product: S sequences, r rows of each.

    `rows` are the pass rows `[S * r]`, sequence by sequence. Keys from `masked_from` on are hidden where `mask`
    (`[S, 1, M, keys - masked_from]`, M query rows after padding) is true; those before it are seen by all.
    """

    rows: slice | Tensor
    sequences: int
    rows_each: int
    padded: int
    blocks: int
    masked_from: int
    mask: Tensor


@dataclass(frozen=True)
class Gather:
    """Keys and values fetched together: S sequences, n blocks of each.

    `units` index the pool's units of layer 0: first K in the order [S, H, n, unit], then V as [S, n, H, unit].
    """

    units: Tensor
    sequences: int
    blocks: int
    tiles: list[Tile]


@dataclass(frozen=True)
class PassPlan:
    """Everything about a pass that is the same in each layer.

    `positions: [R]`; `written: [R * 2 * H]` are the pool's token rows of layer 0 that the pass writes, K heads then V
    heads of each row.
    """

    geometry: PoolGeometry
    positions: Tensor
    written: Tensor
    gathers: list[Gather]


def plan_pass(spans: Sequence[SpanLike], geometry: PoolGeometry) -> PassPlan:
    positions = torch.cat([torch.arange(s.start, s.start + s.rows) for s in spans])
    pages = torch.cat([_pages_of_rows(s, geometry) for s in spans])
    return PassPlan(geometry, positions, _token_rows(pages, positions, geometry), _plan_gathers(spans, geometry))


def scrub_tails(spans: Sequence[SpanLike], pool: Tensor) -> None:
    """Zeroes the V slots behind each span's end in its last page, in all layers.

    Such a slot has weight 0, but 0 * NaN is NaN: whatever an earlier owner of the page left must not be read. The
    page is the span's own, since the span writes to it. (K needs nothing: masked scores are replaced, not scaled.)
    """
    page_tokens = pool.shape[4]
    for span in spans:
        used = (span.start + span.rows) % page_tokens
        if used:
            pool[span.pages[(span.start + span.rows) // page_tokens], :, 1, :, used:].zero_()


def _pages_of_rows(span: SpanLike, geometry: PoolGeometry) -> Tensor:
    first = span.start // geometry.page_tokens
    pages = torch.tensor(span.pages[first:], dtype=torch.int64)
    return pages[torch.arange(span.start, span.start + span.rows) // geometry.page_tokens - first]


def _token_rows(pages: Tensor, positions: Tensor, geometry: PoolGeometry) -> Tensor:
    tokens = geometry.page_tokens
    first = pages * (geometry.layers * 2 * geometry.kv_heads * tokens) + positions % tokens
    return (first[:, None] + torch.arange(2 * geometry.kv_heads) * tokens).flatten()


def _plan_gathers(spans: Sequence[SpanLike], geometry: PoolGeometry) -> list[Gather]:
    gathers: list[Gather] = []
    single: list[tuple[SpanLike, int]] = []
    row = 0
    for span in spans:
        if span.rows == 1:
            single.append((span, row))
        elif span.rows:
            gathers.append(_span_gather(span, row, geometry))
        row += span.rows
    # By length, so that sequences fetched together are padded little.
    single.sort(key=lambda entry: entry[0].start, reverse=True)
    while single:
        blocks = single[0][0].start // BLOCK_KEYS + 1
        size = max(1, GROUP_BLOCKS // blocks)
        gathers.append(_decode_gather(single[:size], blocks, geometry))
        single = single[size:]
    return gathers


def _decode_gather(entries: list[tuple[SpanLike, int]], blocks: int, geometry: PoolGeometry) -> Gather:
    """One row of each of several sequences."""
    spans = [span for span, _ in entries]
    positions = torch.tensor([span.start for span in spans])
    masked_from = min(span.start for span in spans) // BLOCK_KEYS * BLOCK_KEYS
    keys = torch.arange(masked_from, blocks * BLOCK_KEYS)
    tile = Tile(
        rows=_slice_if_consecutive([row for _, row in entries]),
        sequences=len(spans),
        rows_each=1,
        padded=_padded(geometry.heads // geometry.kv_heads),
        blocks=blocks,
        masked_from=masked_from,
        mask=(keys > positions[:, None])[:, None, None],
    )
    return Gather(_units(spans, blocks, geometry), len(spans), blocks, [tile])


def _span_gather(span: SpanLike, row: int, geometry: PoolGeometry) -> Gather:
    """Many rows of one sequence, in tiles: later tiles see more of the same keys."""
    blocks = (span.start + span.rows - 1) // BLOCK_KEYS + 1
    tile_rows = max(16, TILE_SCORES // (blocks * BLOCK_KEYS * geometry.heads) // 16 * 16)
    tiles = [
        _span_tile(span, row, begin, min(tile_rows, span.rows - begin), geometry)
        for begin in range(0, span.rows, tile_rows)
    ]
    return Gather(_units([span], blocks, geometry), 1, blocks, tiles)


def _span_tile(span: SpanLike, row: int, begin: int, rows: int, geometry: PoolGeometry) -> Tile:
    group = geometry.heads // geometry.kv_heads
    first = span.start + begin
    blocks = (first + rows - 1) // BLOCK_KEYS + 1
    masked_from = first // BLOCK_KEYS * BLOCK_KEYS
    padded = _padded(rows * group)
    positions = first + (torch.arange(padded) // group).clamp_(max=rows - 1)
    keys = torch.arange(masked_from, blocks * BLOCK_KEYS)
    mask = (keys > positions[:, None])[None, None]
    return Tile(slice(row + begin, row + begin + rows), 1, rows, padded, blocks, masked_from, mask)


def _slice_if_consecutive(rows: list[int]) -> slice | Tensor:
    """A slice is a view where an index tensor is a copy."""
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows)


def _padded(rows: int) -> int:
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


def _units(spans: Sequence[SpanLike], blocks: int, geometry: PoolGeometry) -> Tensor:
    """The units of `blocks` blocks of each span, K then V (see `Gather`).

    Units behind a span's end stand for positions that its rows mask: its own first unit is read in their place,
    so that nobody else's bytes, and no slot that was never written, come near the products.
    """
    unit, per_head, heads = geometry.unit_tokens, geometry.units_per_head, geometry.kv_heads
    starts = torch.arange(0, blocks * BLOCK_KEYS, unit)
    ends = torch.tensor([span.start + span.rows for span in spans])
    starts = torch.where(starts < ends[:, None], starts, 0)  # [S, units]
    longest = max(len(span.pages) for span in spans)
    pages = torch.tensor([[*span.pages, *[0] * (longest - len(span.pages))] for span in spans], dtype=torch.int64)
    page = pages.gather(1, starts // geometry.page_tokens)
    first = page * (geometry.layers * 2 * heads * per_head) + starts % geometry.page_tokens // unit
    head = torch.arange(heads) * per_head
    keys = first[:, None, :] + head[:, None]
    values = first.view(len(spans), blocks, 1, -1) + (heads * per_head + head)[:, None]
    return torch.cat([keys.flatten(), values.flatten()])
