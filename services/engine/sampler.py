"""Chooses a token from a row of logits: a pure function of the row, the tokens before it, and (seed, choice, index).

There is no generator state, so any worker continues a choice where another left it. Works on one row at a time:
batch mates cannot influence the result. Knows nothing of text, stop strings or the model.
"""

import hashlib
import struct
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from schemas.errors import NotFinite
from schemas.events import Logprobs
from schemas.job import Sampling

GREEDY_TEMPERATURE = 1e-5  # below it the best token's share differs from 1 by less than a float64 can tell
_NUM_HASH_BITS = 53
_MAX_SCORE = 1e300  # a repetition penalty near 0 makes infinite scores, and their differences are no numbers

Row = npt.NDArray[np.float32]
Scores = npt.NDArray[np.float64]


class Sampled(NamedTuple):
    id: int
    logprobs: Logprobs | None


def uniform(seed: int, choice: int, index: int) -> float:
    """A number in [0, 1) that belongs to token `index` of `choice`: the first 53 bits of a keyed hash."""
    message = struct.pack("<QQQ", seed & 0xFFFF_FFFF_FFFF_FFFF, choice, index)
    digest = hashlib.blake2b(message, digest_size=8, person=b"kvrelay-sample").digest()
    return (int.from_bytes(digest, "little") >> (64 - _NUM_HASH_BITS)) * 2.0**-_NUM_HASH_BITS


class Sampler:
    """One choice of one job. `seed` is resolved; `prompt` is read for the repetition penalty."""

    def __init__(self, sampling: Sampling, seed: int, choice: int, prompt: Iterable[int]) -> None:
        self._sampling = sampling
        self._seed = seed
        self._choice = choice
        self._generated: Counter[int] = Counter()
        self._greedy = sampling.temperature < GREEDY_TEMPERATURE or sampling.top_k == 1 or sampling.top_p == 0.0
        self._prompt_ids = (
            np.unique(np.fromiter(prompt, dtype=np.int64)) if sampling.repetition_penalty != 1.0 else None
        )
        self._shifts = bool(
            sampling.logit_bias
            or sampling.presence_penalty
            or sampling.frequency_penalty
            or sampling.repetition_penalty != 1.0
        )

    def note(self, token_id: int) -> None:
        """Records a generated token; penalties of later tokens count it."""
        self._generated[token_id] += 1

    def sample(self, logits: Row, index: int) -> Sampled:
        """Token `index` (0 is the first generated one) from `logits: [V] float32`.

        Raises `NotFinite` when a logit is NaN or the largest is infinite: the request ends, its mates go on.
        """
        top = logits.max()
        if not np.isfinite(top):
            raise NotFinite("the model produced a logit that is not a number")
        scores = self._shifted(logits) if self._shifts else logits
        # numpy's argmax is the first of equals: the lowest id
        token = int(scores.argmax()) if self._greedy else self._draw(np.asarray(scores, dtype=np.float64), index)
        wanted = self._sampling.logprobs
        return Sampled(token, None if wanted is None else logprobs_of(logits, token, wanted))

    def _shifted(self, logits: Row) -> Scores:
        sampling = self._sampling
        scores = logits.astype(np.float64)
        for token, bias in sampling.logit_bias.items():
            scores[token] += bias
        generated = np.fromiter(self._generated, dtype=np.int64, count=len(self._generated))
        if self._prompt_ids is not None:
            seen = np.union1d(self._prompt_ids, generated)
            values = scores[seen]
            penalty = sampling.repetition_penalty
            with np.errstate(over="ignore"):
                scores[seen] = np.where(values > 0, values / penalty, values * penalty)
        if len(generated):
            counts = np.fromiter(self._generated.values(), dtype=np.float64, count=len(generated))
            scores[generated] -= sampling.frequency_penalty * counts + sampling.presence_penalty
        return scores

    def _draw(self, scores: Scores, index: int) -> int:
        sampling = self._sampling
        with np.errstate(over="ignore"):
            scores = np.clip(scores / sampling.temperature, -_MAX_SCORE, _MAX_SCORE)
        ids, weights = _candidates(scores, sampling.top_k, sampling.top_p, sampling.min_p)
        cumulative = np.cumsum(weights)
        point = uniform(self._seed, self._choice, index) * cumulative[-1]
        return int(ids[min(int(np.searchsorted(cumulative, point, side="right")), len(ids) - 1)])


def _candidates(scores: Scores, top_k: int, top_p: float, min_p: float) -> tuple[npt.NDArray[np.int64], Scores]:
    """Ids that may be drawn and their weights (not normalised): top_k, then top_p of what is left, then min_p.

    Without a filter the order is by id, with one it is by score, equals by id.
    """
    top = scores.max()
    if 0 < top_k < len(scores):
        ids = _best(scores, top_k)
        weights = np.exp(scores[ids] - top)
    else:
        ids = np.arange(len(scores))
        weights = np.exp(scores - top)
    if top_p < 1.0:
        ids, weights = _nucleus(scores, ids, weights, top_p)
    if min_p > 0.0:
        keep = weights >= min_p * weights.max()
        ids, weights = ids[keep], weights[keep]
    return ids, weights


def _best(scores: Scores, count: int) -> npt.NDArray[np.int64]:
    """The `count` best ids, best first, equals by id. Partial: only scores that reach the count-th are sorted."""
    threshold = np.partition(scores, len(scores) - count)[len(scores) - count]
    reached = np.flatnonzero(scores >= threshold)
    order = np.argsort(-scores[reached], kind="stable")
    return reached[order][:count]


def _nucleus(
    scores: Scores, ids: npt.NDArray[np.int64], weights: Scores, top_p: float
) -> tuple[npt.NDArray[np.int64], Scores]:
    """The smallest best-first set that holds `top_p` of the weight; at least one id."""
    wanted = top_p * weights.sum()
    count = min(64, len(ids))
    while True:
        best = _best(scores[ids], count) if len(ids) > count else np.argsort(-scores[ids], kind="stable")
        cumulative = np.cumsum(weights[best])
        if cumulative[-1] >= wanted or len(best) == len(ids):
            size = int(np.searchsorted(cumulative, wanted, side="left")) + 1
            chosen = best[: min(size, len(best))]
            return ids[chosen], weights[chosen]
        count *= 8


def logprobs_of(logits: Row, token: int, num_top: int) -> Logprobs:
    """Of the model's own distribution, before penalties and temperature."""
    scores = logits.astype(np.float64)
    top = scores.max()
    norm = top + np.log(np.exp(scores - top).sum())
    best = _best(scores, num_top) if num_top else ()
    return Logprobs(logprob=float(scores[token] - norm), top=[(int(i), float(scores[i] - norm)) for i in best])
