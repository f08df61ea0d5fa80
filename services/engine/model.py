"""The Llama forward pass over a paged KV pool.

Exact by construction: a row's K, V and logits are, bit for bit, a function of the tokens up to that row. Not of the
rows beside it, of how a prompt was cut into passes, of the page size, or of the number of threads. Prefill and
decode are the same function called with other rows.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.arithmetic import Arithmetic
from kernels.paging import PassPlan, PoolGeometry, plan_pass, scrub_tails
from kernels.reference.attention import attend, write_kv
from kernels.reference.gate import silu_gate
from kernels.reference.norm import rms_norm
from kernels.reference.rope import RopeTable, rotate_
from services.engine.lease import Lease
from services.engine.model_config import ModelConfig
from services.engine.weights import Layer, load_weights

__all__ = ["Model", "ModelConfig", "Span"]


@dataclass(frozen=True, slots=True)
class Span:
    """Rows [start, start + rows) of one sequence; `pages` cover positions [0, start + rows).

    The page that holds the last row belongs to this span alone: what lies in it behind the span is overwritten.
    """

    start: int
    rows: int
    pages: Sequence[int]


class Files(Protocol):
    """What a model needs of `services.models.files.ModelFiles`."""

    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def weights(self) -> Sequence[Path]: ...


class Model:
    """Not thread-safe: one pass at a time."""

    borrows = False  # torch could not give a lent core back before a pass is over

    def __init__(self, files: Files, arithmetic: Arithmetic) -> None:
        """Raises `SetupError` for a model that is unsupported or incomplete."""
        self.config = ModelConfig.from_hf(files.config)
        self.arithmetic = arithmetic
        self._weights = load_weights(files.weights, self.config, arithmetic)
        self._rope = RopeTable(
            self.config.head_dim, self.config.context_tokens, self.config.rope_theta, self.config.rope_scaling
        )

    def with_arithmetic(self, arithmetic: Arithmetic) -> "Model":
        """Another model around the same weights; `arithmetic` may differ in its quantisation only."""
        assert (arithmetic.dtype, arithmetic.layer_recipe.name) == (
            self.arithmetic.dtype,
            self.arithmetic.layer_recipe.name,
        )
        other = copy.copy(self)
        other.arithmetic = arithmetic
        return other

    def use_threads(self, lease: Lease) -> None:
        """Of the next pass."""

    @property
    def kv_bytes_per_token(self) -> int:
        values = self.config.num_layers * 2 * self.config.num_kv_heads * self.config.head_dim
        return values * self.arithmetic.kv_dtype.itemsize

    def page_shape(self, block_tokens: int) -> tuple[int, int, int, int]:
        """(L, H, T, D) of a pool `[P, L, 2, H, T, D]`; T a multiple of 16."""
        return self.config.num_layers, self.config.num_kv_heads, block_tokens, self.config.head_dim

    def new_pool(self, num_pages: int, block_tokens: int) -> Tensor:
        """`[P, L, 2, H, T, D]` of zeros. `forward` does not care what is in pages that were never written."""
        layers, heads, tokens, dim = self.page_shape(block_tokens)
        return torch.zeros(num_pages, layers, 2, heads, tokens, dim, dtype=self.arithmetic.kv_dtype)

    @torch.inference_mode()
    def forward(
        self, token_ids: Sequence[int] | Tensor, spans: Sequence[Span], pool: Tensor, logit_rows: Sequence[int] | None
    ) -> Tensor:
        """`token_ids: [R]`, the spans' rows one after the other -> `[len(logit_rows), V] float32`, None meaning all.

        Writes K and V of the rows to the pool, then attends to what is stored. Raises `ValueError` for rows that
        the pages or the context do not hold, before anything is written.
        """
        ids = torch.as_tensor(token_ids, dtype=torch.int64)
        self._check(ids, spans, pool)
        rows = torch.arange(ids.shape[0]) if logit_rows is None else torch.tensor(logit_rows, dtype=torch.int64)
        if not ids.shape[0]:
            return torch.empty(0, self.config.vocab_size)
        plan = plan_pass(spans, self._geometry(pool))
        scrub_tails(spans, pool)
        rotation = self._rope.rows(plan.positions)
        x = self._weights.embedding[ids].float()
        for number, layer in enumerate(self._weights.layers):
            x = self._layer(x, number, layer, pool, plan, rotation)
        return self._weights.head(rms_norm(x[rows], self._weights.norm, self.config.norm_eps))

    def _layer(
        self, x: Tensor, number: int, layer: Layer, pool: Tensor, plan: PassPlan, rotation: tuple[Tensor, Tensor]
    ) -> Tensor:
        """`x: [R, hidden] float32`, changed in place; `rotation` of the plan's positions."""
        config = self.config
        qkv = layer.qkv(rms_norm(x, layer.attention_norm, config.norm_eps)).view(x.shape[0], -1, config.head_dim)
        rotate_(qkv[:, : config.num_heads + config.num_kv_heads], *rotation)
        write_kv(pool, number, self.arithmetic.as_stored(qkv[:, config.num_heads :]), plan)
        attended = attend(pool, number, qkv[:, : config.num_heads], plan)
        x.add_(layer.attention_out(attended))
        gate_up = layer.gate_up(rms_norm(x, layer.mlp_norm, config.norm_eps))
        return x.add_(layer.down(silu_gate(gate_up)))

    def _geometry(self, pool: Tensor) -> PoolGeometry:
        layers, heads, tokens, dim = self.page_shape(pool.shape[4])
        return PoolGeometry(layers, heads, tokens, dim, self.config.num_heads)

    def _check(self, ids: Tensor, spans: Sequence[Span], pool: Tensor) -> None:
        tokens = pool.shape[4]
        if pool.shape[1:] != (self.config.num_layers, 2, *self.page_shape(tokens)[1:]) or not pool.is_contiguous():
            raise ValueError(f"a pool of shape {list(pool.shape)} does not fit this model")
        if pool.dtype != self.arithmetic.kv_dtype or tokens % 16:
            raise ValueError(f"a pool of {pool.dtype} with {tokens} tokens a page does not fit this arithmetic")
        if ids.shape[0] != sum(span.rows for span in spans):
            raise ValueError(f"{ids.shape[0]} token ids for spans of {[span.rows for span in spans]} rows")
        for span in spans:
            end = span.start + span.rows
            if span.start < 0 or end > self.config.context_tokens or end > len(span.pages) * tokens:
                raise ValueError(f"rows {span.start} to {end} with {len(span.pages)} pages of {tokens} tokens")
