"""Chooses one id from a row of scores: the definition, in plain numpy.

Weights are whole numbers, so that their sums are exact in every order: what is chosen does not depend on how the best
ids are found, or on how many at a time.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kernels.reference.int8 import exp

WEIGHT_ONE = 2.0**40  # the weight of the best id

Row = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Weights = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.uint32]
"""A bit an id, lowest first: `[ceil(V / 32)]`."""


class Draw(NamedTuple):
    """How one id is chosen. `top_k` <= 0, `top_p` >= 1 and `min_p` <= 0 filter nothing; `hash` is 64 bits of chance.

    `allowed`: the ids whose bit is set; the scores of others are -inf before anything else is looked at. None: all.
    """

    greedy: bool
    inv_temperature: float  # a float32
    top_k: int
    top_p: float
    min_p: float
    hash: int
    allowed: Mask | None = None


def choose(scores: Row, draw: Draw) -> int | None:
    """The id drawn from `scores: [V] float32`, V < 2**23; None if an allowed one is NaN or the largest is infinite.

    Best first is by score, equals by id. `top_k` best ids are kept; of these the shortest best-first run that has
    `top_p` of their weight, at least one; of these the ids with `min_p` of the best one's weight.
    """
    scores = masked(scores, draw.allowed)
    best = scores.max()
    if not np.isfinite(best):  # numpy's max of NaN and anything is NaN
        return None
    if draw.greedy:
        return int(scores.argmax())  # the first of equals
    ids = np.arange(len(scores))
    weights = weights_of(scores, best, np.float32(draw.inv_temperature))
    if 0 < draw.top_k < len(ids):
        kept = _best_first(scores)[: draw.top_k]
        ids, weights = ids[kept], weights[kept]
    if draw.top_p < 1.0:
        order = _best_first(scores[ids])
        kept = order[: _nucleus_size(weights[order], draw.top_p)]
        ids, weights = ids[kept], weights[kept]
    if draw.min_p > 0.0:
        enough = weights >= np.uint64(draw.min_p * WEIGHT_ONE)
        ids, weights = ids[enough], weights[enough]
    return _drawn(ids, weights, draw.hash)


def masked(scores: Row, allowed: Mask | None) -> Row:
    """`scores` with -inf for the ids that are not allowed."""
    if allowed is None:
        return scores
    bits = np.unpackbits(allowed.view(np.uint8), count=len(scores), bitorder="little")
    return np.where(bits, scores, np.float32(-np.inf))


def weights_of(scores: Row, best: np.float32, inv_temperature: np.float32) -> Weights:
    """exp((score - best) / temperature) in steps of 2**-40, rounded down: `[V] uint64`."""
    with np.errstate(over="ignore"):
        z = (scores - best) * inv_temperature
    return np.trunc(exp(torch.from_numpy(z)).numpy().astype(np.float64) * WEIGHT_ONE).astype(np.uint64)


def _best_first(scores: Row) -> Ids:
    """Indices by score, equals by index."""
    return np.argsort(-scores, kind="stable")


def _nucleus_size(weights: Weights, top_p: float) -> int:
    """Of `weights` in best-first order; all of them where rounding puts `top_p` of the total above the total."""
    sums = np.cumsum(weights)
    wanted = np.uint64(float(top_p) * float(sums[-1]))
    return min(int(np.searchsorted(sums, wanted, side="left")) + 1, len(sums))


def _drawn(ids: Ids, weights: Weights, hash: int) -> int:
    order = np.argsort(ids)
    sums = np.cumsum(weights[order])
    point = (hash * int(sums[-1])) >> 64
    return int(ids[order][np.searchsorted(sums, np.uint64(point), side="right")])
