"""Chooses a token from a row of logits: a pure function of the row, the tokens before it, and (seed, choice, index).

There is no generator state, so any worker continues a choice where another left it. Works on one row at a time:
batch mates cannot influence the result. Knows nothing of text, stop strings or the model.
"""

import hashlib
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.sampling import Draw, Mask, Row, choose, masked
from schemas.errors import NotFinite
from schemas.events import Logprobs
from schemas.job import Sampling
from services.text.grammar import Matcher

GREEDY_TEMPERATURE = 1e-5  # below it logits that float32 can tell apart differ by more than a draw can notice
_MAX_SCORE = float(np.finfo(np.float32).max)  # a repetition penalty near 0 makes scores that float32 cannot hold


class Sampled(NamedTuple):
    id: int
    logprobs: Logprobs | None


def hash64(seed: int, choice: int, index: int) -> int:
    """The 64 bits of chance that belong to token `index` of `choice`: a keyed hash."""
    message = struct.pack("<QQQ", seed & 0xFFFF_FFFF_FFFF_FFFF, choice, index)
    digest = hashlib.blake2b(message, digest_size=8, person=b"kvrelay-sample").digest()
    return int.from_bytes(digest, "little")


class Sampler:
    """One choice of one job. `seed` is resolved; `prompt` is read for the repetition penalty; `matcher` is this
    choice's own and says which tokens are allowed, None: all.

    Methods that take `since`, the tokens before an index that were not noted, and `allowed`, what the matcher allows
    behind these, need both to fit.
    """

    def __init__(
        self, sampling: Sampling, seed: int, choice: int, prompt: Iterable[int], matcher: Matcher | None = None
    ) -> None:
        self._sampling = sampling
        self._seed = seed
        self._choice = choice
        self.matcher = matcher
        self._generated: Counter[int] = Counter()
        self._greedy = sampling.temperature < GREEDY_TEMPERATURE or sampling.top_k == 1 or sampling.top_p == 0.0
        self._inv_temperature = 1.0 if self._greedy else float(np.float32(1.0 / sampling.temperature))
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
        """Records a generated token; penalties of later tokens count it, and what is allowed follows from it."""
        if self.matcher is not None:
            self.matcher.advance(token_id)
        if self._shifts:
            self._generated[token_id] += 1

    @property
    def is_plain(self) -> bool:
        """A token depends on nothing but the model's logits and `draw`."""
        return not self._shifts and self._sampling.logprobs is None

    def num_possible(self, guesses: Sequence[int]) -> int:
        """How many of `guesses`, the next tokens, may come at all."""
        return len(guesses) if self.matcher is None else self.matcher.num_fitting(guesses)

    def forced(self) -> list[int]:
        """The next tokens, as far as there is no choice about them."""
        return [] if self.matcher is None else self.matcher.forced()

    def allowed(self) -> Mask | None:
        """The ids that may come next; None: all. Raises `GrammarFailed`."""
        return None if self.matcher is None else self.matcher.mask()

    def draw(self, index: int, allowed: Mask | None = None) -> Draw:
        """How token `index` is chosen from its scores."""
        sampling = self._sampling
        chance = 0 if self._greedy else hash64(self._seed, self._choice, index)
        return Draw(
            self._greedy, self._inv_temperature, sampling.top_k, sampling.top_p, sampling.min_p, chance, allowed
        )

    def sample(self, logits: Row, index: int, since: Sequence[int] = (), allowed: Mask | None = None) -> Sampled:
        """Token `index` (0 is the first generated one) from `logits: [V] float32`.

        Raises `NotFinite` when an allowed logit is NaN or the largest is infinite: the request ends, its mates go on.
        """
        logits = masked(logits, allowed)
        token = None
        if np.isfinite(logits.max()):
            token = choose(self._shifted(logits, since) if self._shifts else logits, self.draw(index))
        if token is None:
            raise not_finite()
        wanted = self._sampling.logprobs
        return Sampled(token, None if wanted is None else logprobs_of(logits, token, wanted))

    def _shifted(self, logits: Row, since: Sequence[int]) -> Row:
        """In float64, then rounded once. What becomes too large for float32 is its largest number."""
        sampling = self._sampling
        scores = logits.astype(np.float64)
        for token, bias in sampling.logit_bias.items():
            scores[token] += bias
        counted = self._generated + Counter(since)
        generated = np.fromiter(counted, dtype=np.int64, count=len(counted))
        if self._prompt_ids is not None:
            seen = np.union1d(self._prompt_ids, generated)
            values = scores[seen]
            penalty = sampling.repetition_penalty
            with np.errstate(over="ignore"):
                scores[seen] = np.where(values > 0, values / penalty, values * penalty)
        if len(generated):
            counts = np.fromiter(counted.values(), dtype=np.float64, count=len(counted))
            scores[generated] -= sampling.frequency_penalty * counts + sampling.presence_penalty
        with np.errstate(over="ignore"):  # what is too small becomes -inf, and is never drawn
            return np.minimum(scores, _MAX_SCORE).astype(np.float32)


def not_finite() -> NotFinite:
    return NotFinite("the model produced a logit that is not a number")


def logprobs_of(logits: Row, token: int, num_top: int) -> Logprobs:
    """Of the model's own distribution, before penalties and temperature; where only some tokens are allowed, of these.

    `top` has fewer where fewer are allowed.
    """
    scores = logits.astype(np.float64)
    top = scores.max()
    norm = top + np.log(np.exp(scores - top).sum())
    num_top = min(num_top, int(np.count_nonzero(scores > -np.inf)))
    best = _best(scores, num_top) if num_top else ()
    return Logprobs(logprob=float(scores[token] - norm), top=[(int(i), float(scores[i] - norm)) for i in best])


def _best(scores: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.int64]:
    """The `count` best ids, best first, equals by id. Partial: only scores that reach the count-th are sorted."""
    threshold = np.partition(scores, len(scores) - count)[len(scores) - count]
    reached = np.flatnonzero(scores >= threshold)
    order = np.argsort(-scores[reached], kind="stable")
    return reached[order][:count]
