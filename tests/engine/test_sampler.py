"""The sampler is a pure function of the row, the tokens before it, and (seed, choice, index)."""

import numpy as np
import pytest

from schemas.errors import NotFinite
from schemas.job import Sampling
from services.engine.sampler import Sampler, hash64, logprobs_of

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
    assert [i for i, _ in logprobs_of(logits, 0, 3).top] == [30, 500, 900]
    assert sample(logits, top_k=1) == 30


def test_a_hash_is_a_fixed_function():
    assert hash64(1, 0, 0) == hash64(1, 0, 0)
    assert len({hash64(s, c, i) for s in range(5) for c in range(5) for i in range(5)}) == 125
    assert hash64(-1, 0, 0) == hash64(2**64 - 1, 0, 0)


def test_the_hash_never_changes():
    """Streams of running jobs are continued across versions: these numbers are part of the wire."""
    assert [(hash64(42, choice, index) >> 11) * 2**-53 for choice, index in ((0, 0), (0, 1), (1, 0))] == (
        HASH_CONSTANTS
    )


HASH_CONSTANTS = [0.8931601572260577, 0.9157131155806837, 0.2548601041457855]


@pytest.mark.parametrize("over", ["seed", "choice", "index"])
def test_draws_follow_the_distribution(over: str):
    """Chi-square: 7 degrees of freedom exceed 29.9 once in 10,000 times."""
    shares = np.array([0.3, 0.2, 0.15, 0.1, 0.1, 0.08, 0.05, 0.02])
    logits = 2.0 + np.log(shares).astype(np.float32)
    drawn = [sample(logits, **{"seed": 7, over: i}) for i in range(6000)]
    counts = np.array([drawn.count(token) for token in range(8)])
    assert ((counts - 6000 * shares) ** 2 / (6000 * shares)).sum() < 29.9


def test_temperature_divides_the_logits():
    logits = np.log(np.array([0.8, 0.2], dtype=np.float32))
    drawn = [sample(logits, index=i, temperature=2.0) for i in range(3000)]
    assert drawn.count(0) / 3000 == pytest.approx(2 / 3, abs=0.03)


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
