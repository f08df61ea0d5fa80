"""The sampler is a pure function of the row, the tokens before it, and (seed, choice, index)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import NotFinite
from schemas.job import Sampling
from services.engine.sampler import Sampler, _best, _candidates, logprobs_of, uniform

VOCAB = 1000


def row(seed: int, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(VOCAB) * scale).astype(np.float32)


def sample(logits: np.ndarray, index: int = 0, seed: int = 7, choice: int = 0, prompt=(), **sampling) -> int:
    return Sampler(Sampling(**sampling), seed, choice, prompt).sample(logits, index).id


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": t} for t in (0.0, 1e-9, 1e-45, 1e-6)]
    + [{"temperature": 1.0, "top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-4}, {"min_p": 1.0}],
)
def test_extremes_are_exactly_greedy(sampling):
    for seed in range(20):
        logits = row(seed)
        assert sample(logits, seed=seed, **sampling) == int(logits.argmax())


def test_ties_go_to_the_lowest_id():
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[[900, 30, 500]] = 5.0
    assert sample(logits, temperature=0.0) == 30
    assert list(_best(logits.astype(np.float64), 2)) == [30, 500]
    assert sample(logits, top_k=1) == 30


def test_uniform_is_a_fixed_function():
    assert uniform(1, 0, 0) == uniform(1, 0, 0)
    assert len({uniform(s, c, i) for s in range(5) for c in range(5) for i in range(5)}) == 125
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)
    values = [uniform(3, 0, i) for i in range(4000)]
    assert 0.0 <= min(values) and max(values) < 1.0
    assert abs(np.mean(values) - 0.5) < 0.02


def test_uniform_never_changes():
    """Streams of running jobs are continued across versions: these numbers are part of the wire."""
    assert [uniform(42, choice, index) for choice, index in ((0, 0), (0, 1), (1, 0))] == UNIFORM_CONSTANTS


UNIFORM_CONSTANTS = [0.8931601572260577, 0.9157131155806837, 0.2548601041457855]


def test_draws_follow_the_distribution():
    logits = np.full(VOCAB, -30.0, dtype=np.float32)
    logits[[3, 5, 9]] = np.log([0.5, 0.3, 0.2])
    drawn = [sample(logits, index=i) for i in range(3000)]
    for token, share in ((3, 0.5), (5, 0.3), (9, 0.2)):
        assert abs(drawn.count(token) / 3000 - share) < 0.04


@given(st.integers(0, 10_000), st.integers(0, 60), st.floats(0.01, 1.0), st.floats(0.0, 0.5))
@settings(max_examples=60, deadline=None)
def test_candidates_equal_a_full_sort(seed, top_k, top_p, min_p):
    scores = np.round(row(seed).astype(np.float64), 1)  # rounded: ties are frequent
    ids, _ = _candidates(scores, top_k, top_p, min_p)
    order = sorted(range(VOCAB), key=lambda i: (-scores[i], i))
    if top_k:
        order = order[:top_k]
    weights = np.exp(scores[order] - scores.max())
    if top_p < 1.0:
        order = order[: int(np.searchsorted(np.cumsum(weights), top_p * weights.sum(), side="left")) + 1]
    kept = [i for i in order if np.exp(scores[i] - scores.max()) >= min_p]
    # sums in another order may move the edge of the nucleus by one id
    assert abs(len(ids) - len(kept)) <= 1
    assert set(ids) ^ set(kept) <= {order[-1]} | set(ids[-1:])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_ends_its_job_only(bad):
    logits = row(1)
    logits[17] = bad
    with pytest.raises(NotFinite):
        sample(logits)


def test_minus_infinity_is_a_token_that_is_never_drawn():
    logits = np.full(VOCAB, -np.inf, dtype=np.float32)
    logits[12] = 1.0
    assert sample(logits) == 12


def test_penalties_and_bias():
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[4], logits[8] = 2.0, 1.5
    assert sample(logits, temperature=0.0, logit_bias={8: 1.0}) == 8
    assert sample(logits, temperature=0.0, repetition_penalty=2.0, prompt=[4]) == 8
    sampler = Sampler(Sampling(temperature=0.0, frequency_penalty=0.3), 0, 0, [4, 4, 4])
    assert sampler.sample(logits, 0).id == 4, "the prompt does not count for the frequency penalty"
    sampler.note(4)
    sampler.note(4)
    assert sampler.sample(logits, 1).id == 8
    sampler = Sampler(Sampling(temperature=0.0, presence_penalty=1.0), 0, 0, [])
    sampler.note(4)
    assert sampler.sample(logits, 1).id == 8


def test_equal_bias_on_every_token_changes_nothing():
    logits = row(5)
    bias = dict.fromkeys(range(VOCAB), -100.0)
    assert sample(logits, temperature=0.0, logit_bias=bias) == sample(logits, temperature=0.0)


def test_logprobs_are_the_models_own():
    logits = row(2)
    reported = logprobs_of(logits, 10, 3)
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    assert reported.logprob == pytest.approx(exact[10])
    assert [i for i, _ in reported.top] == list(np.argsort(-exact)[:3])


@pytest.mark.parametrize("extra", [{}, {"min_p": 0.1}, {"top_p": 0.5}, {"top_k": 3}])
def test_a_penalty_near_zero_breaks_nothing(extra: dict):
    """Scores become infinite; a step that fails would take all of the batch with it."""
    sampler = Sampler(Sampling(repetition_penalty=1e-310, temperature=1.0, **extra), 1, 0, [1, 2])
    logits = np.array([1.0, 2.0, -3.0, 4.0, -np.inf], dtype=np.float32)
    assert 0 <= sampler.sample(logits, 0).id < len(logits)
