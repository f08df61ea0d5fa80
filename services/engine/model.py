"""What a model is to the engine: rows of token ids in, logits out, K and V in pages; whoever computes it, and how.

Exact by contract: a row's K, V and logits are, bit for bit, a function of the tokens up to that row. Not of the rows
beside it, of how a prompt was cut into passes, of the page size, or of the number of threads. Prefill and decode are
the same function called with other rows.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from kernels.arithmetic import Arithmetic
from kernels.page_form import PageForm
from services.engine.lease import Lease
from services.engine.model_config import ModelConfig

__all__ = ["Files", "Model", "ModelConfig", "Span"]


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
    def config(self) -> Mapping[str, Any]: ...
    @property
    def weights(self) -> Sequence[Path]: ...


class Model(ABC):
    """Not thread-safe: one pass at a time."""

    borrows = False  # whether a core that is lent for a pass can be given back before it is over
    weight_bytes = 0  # that a step reads; 0: not known

    def __init__(self, config: ModelConfig, arithmetic: Arithmetic) -> None:
        self.config = config
        self.arithmetic = arithmetic

    def use_threads(self, lease: Lease) -> None:
        """Of the next pass. Without `borrows`, threads stay as they are."""
        return None

    @abstractmethod
    def forward(
        self, token_ids: Sequence[int] | Tensor, spans: Sequence[Span], pool: Tensor, logit_rows: Sequence[int] | None
    ) -> Tensor:
        """`token_ids: [R]`, the spans' rows one after the other -> `[len(logit_rows), V] float32`, None meaning all.

        Writes K and V of the rows to the pool, then attends to what is stored. Raises `ValueError` for rows that
        the pages or the context do not hold, before anything is written.
        """

    def with_arithmetic(self, arithmetic: Arithmetic) -> "Model":
        """Another model around the same weights; `arithmetic` may differ in its quantisation only."""
        assert type(arithmetic) is type(self.arithmetic)
        other = copy.copy(self)
        other.arithmetic = arithmetic
        return other

    def page_form(self, page_tokens: int, arithmetic: Arithmetic | None = None) -> PageForm:
        """Of this model's pages of so many tokens, a multiple of 16; of those of another `arithmetic`, if given."""
        config = self.config
        return (arithmetic or self.arithmetic).page_form(
            config.num_layers, config.num_kv_heads, page_tokens, config.head_dim
        )

    @property
    def kv_bytes_per_token(self) -> int:
        return self.page_form(16).token_bytes

    def new_pool(self, num_pages: int, page_tokens: int) -> Tensor:
        """Zeros. `forward` does not care what is in pages that were never written."""
        return self.page_form(page_tokens).empty_pool(num_pages).zero_()

    def form_of(self, pool: Tensor, spans: Sequence[Span], num_ids: int) -> PageForm:
        """The form of `pool`'s pages. Raises `ValueError` where pool, spans and ids do not go with the model."""
        form = self.page_form(self.page_form(16).tokens_in(pool))
        if not form.fits(pool) or not form.page_tokens or form.page_tokens % 16:
            shape = list(pool.shape)
            raise ValueError(f"a pool of {pool.dtype} {shape} does not fit this model and {self.arithmetic.name}")
        if num_ids != sum(span.rows for span in spans):
            raise ValueError(f"{num_ids} token ids for spans of {[span.rows for span in spans]} rows")
        for span in spans:
            end = span.start + span.rows
            if span.start < 0 or end > self.config.context_tokens or end > len(span.pages) * form.page_tokens:
                raise ValueError(f"rows {span.start} to {end}, {len(span.pages)} pages of {form.page_tokens} tokens")
        return form
