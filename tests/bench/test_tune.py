"""`kvrelay tune` measures what it says and chooses by its rule."""

import pytest

from services.bench.tune import Candidate, Measured, candidates, choose, sweep
from services.config import Settings
from tests.pipeline.tiny import tiny_models


def measured(rate: float, gap_ms: float) -> Measured:
    return Measured(Candidate(max_sequences=1), rate, gap_ms / 2, gap_ms)


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [
        ([(100, 10), (200, 20), (300, 200)], (200, 20)),  # the fastest is over the limit
        ([(100, 10), (300, 90), (296, 50), (290, 20)], (296, 50)),  # within 3 % of the best, the shortest gap
        ([(100, 900), (300, 300)], (300, 300)),  # none within the limit: what comes nearest
    ],
)
def test_the_rule(rows: list[tuple[float, float]], chosen: tuple[float, float]) -> None:
    found = choose([measured(*row) for row in rows], max_gap_ms=100.0)
    assert (found.tokens_per_s, found.p99_gap_ms, found.jitter_ms) == (*chosen, chosen[1] / 2)


@pytest.mark.parametrize("block_tokens", [16, 64, 128, 1024])
def test_candidates_are_settings_that_may_be(block_tokens: int) -> None:
    for candidate in candidates(block_tokens):
        settings = Settings()
        values = {name.removeprefix("scheduler."): value for name, value in candidate.values().items()}
        assert set(values) <= set(settings.scheduler.__struct_fields__)
        if candidate.is_of_prompts:
            assert candidate.chunk_tokens % block_tokens == 0 and candidate.token_budget >= candidate.chunk_tokens


def test_each_candidate_is_measured_by_the_scheduler_itself() -> None:
    told: list[str] = []
    tried = [Candidate(16, 64), Candidate(32, 32), Candidate(max_sequences=2), Candidate(max_sequences=5)]
    rows = list(sweep(tiny_models()[0], 16, 2, told.append, tried))
    assert [row.candidate for row in rows] == tried
    assert told[0] == "round 1 of 2: scheduler.chunk_tokens 16, scheduler.token_budget 64" and len(told) == 8
    for row in rows:
        assert row.tokens_per_s > 0 and row.p99_gap_ms >= row.p50_gap_ms > 0
    assert sorted(rows[2].row()) == ["jitter_ms", "max_sequences", "p99_gap_ms", "tokens_per_s"]
