"""One text computed by a model in every way that a pipeline may choose."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.exactness import threads
from services.engine.model import Model, Span


@dataclass(frozen=True)
class Path:
    """`cuts`: rows of each pass; `mate`: rows of another prompt in the same passes."""

    cuts: Sequence[int]
    page_tokens: int = 64
    num_threads: int = 1
    mate: int = 0


def compute(model: Model, ids: Tensor, path: Path) -> tuple[Tensor, Tensor]:
    """Logits `[R, V]` and the bytes of K and V `[L, 2, H, R, D * itemsize]` of `ids`, computed along `path`.

    The pool is full of NaN first, and the pages are in reverse order.
    """
    own, others = -(-len(ids) // path.page_tokens), -(-max(path.mate, 1) // path.page_tokens)
    pool = model.new_pool(own + others, path.page_tokens).fill_(math.nan)
    pages, mate_pages = list(range(own))[::-1], list(range(own, own + others))
    mate = [3] * path.mate
    logits, start = [], 0
    with threads(path.num_threads):
        for rows in path.cuts:
            spans = [Span(0, path.mate, mate_pages), Span(start, rows, pages)]
            passed = [*mate, *ids[start : start + rows].tolist()]
            logits.append(model.forward(passed, spans, pool, range(path.mate, path.mate + rows)))
            start += rows
    kv = pool[pages].permute(1, 2, 3, 0, 4, 5).flatten(3, 4)[:, :, :, : len(ids)]
    return torch.cat(logits), kv.contiguous().view(torch.uint8)
