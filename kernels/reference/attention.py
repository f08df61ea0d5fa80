"""Attention over a paged KV pool, exact by construction.

The scores of a row are dot products over D. The softmax runs along the keys of that row alone; keys that it may not see
weigh exactly 0 and stand behind those that it sees, so however many there are changes no sum. The values are summed in
fixed blocks of 64 keys, and the blocks one after the other.
"""

import math

import torch
from torch import Tensor

from kernels.paging import BLOCK_KEYS, Gather, PassPlan, PoolGeometry, Tile


def write_kv(pool: Tensor, layer: int, kv: Tensor, plan: PassPlan) -> None:
    """Stores `kv: [R, 2 * H, D]` (K heads, then V heads) in the pool's dtype."""
    geometry = plan.geometry
    tokens = pool.view(-1, geometry.head_dim)[layer * 2 * geometry.kv_heads * geometry.page_tokens :]
    tokens.index_copy_(0, plan.written, kv.reshape(-1, geometry.head_dim).to(pool.dtype))


def attend(pool: Tensor, layer: int, queries: Tensor, plan: PassPlan) -> Tensor:
    """`queries: [R, heads, D] float32` against the stored K and V of `layer` -> `[R, heads * D] float32`."""
    out = torch.empty(queries.shape[0], queries.shape[1] * queries.shape[2])
    for gather in plan.gathers:
        keys, values = _fetch(pool, layer, gather, plan.geometry)
        for tile in gather.tiles:
            out[tile.rows] = _attend_tile(queries[tile.rows], keys, values, tile, plan.geometry)
    return out


def _fetch(pool: Tensor, layer: int, gather: Gather, geometry: PoolGeometry) -> tuple[Tensor, Tensor]:
    """K `[S * H, keys, D]` and V `[S * blocks * H, 64, D]`, float32."""
    unit = geometry.unit_tokens * geometry.head_dim
    units = pool.view(-1, unit)[layer * 2 * geometry.kv_heads * geometry.units_per_head :]
    keys, values = units.index_select(0, gather.units).float().chunk(2)
    return (
        keys.view(gather.sequences * geometry.kv_heads, gather.blocks * BLOCK_KEYS, geometry.head_dim),
        values.view(gather.sequences * gather.blocks * geometry.kv_heads, BLOCK_KEYS, geometry.head_dim),
    )


def _attend_tile(queries: Tensor, keys: Tensor, values: Tensor, tile: Tile, geometry: PoolGeometry) -> Tensor:
    """`queries: [S * r, heads, D]` -> `[S * r, heads * D]`."""
    sequences, rows, padded, blocks = tile.sequences, tile.rows_each, tile.padded, tile.blocks
    heads, dim = geometry.kv_heads, geometry.head_dim
    group = geometry.heads // heads
    grouped = queries.view(sequences, rows, heads, group, dim).transpose(1, 2)  # [S, H, r, G, D]
    q = queries.new_zeros(sequences, heads, padded, dim)
    torch.mul(grouped, 1 / math.sqrt(dim), out=q[:, :, : rows * group].view(grouped.shape))

    seen = blocks * BLOCK_KEYS
    scores = torch.bmm(q.view(-1, padded, dim), keys[:, :seen].transpose(1, 2))
    scores.view(sequences, heads, padded, seen)[..., tile.masked_from :].masked_fill_(tile.mask, -math.inf)
    weights = torch.softmax(scores, dim=-1).view(sequences, heads, padded, blocks, BLOCK_KEYS)
    # [S * blocks * H, M, 64]; V has its blocks outside its heads, so that the first blocks are one piece.
    blocked = weights.permute(0, 3, 1, 2, 4).reshape(-1, padded, BLOCK_KEYS)
    sums = torch.bmm(blocked, values[: blocked.shape[0]]).view(sequences, blocks, heads, padded, dim)
    out = sums.sum(1)[:, :, : rows * group].view(grouped.shape)
    return out.transpose(1, 2).reshape(sequences * rows, heads * group * dim)
