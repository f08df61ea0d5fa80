"""What a draw means: the definition against a full sort of whole numbers, and what each filter keeps."""

import numpy as np
import pytest
from hypothesis import given, settings

from kernels.reference.sampling import Draw, choose, weights_of
from tests.kernels.sampling_rows import draws, mask_of, row, rows

PLAIN = Draw(greedy=False, inv_temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, hash=0)
NUM_CHANCES = 200


def reachable(scores: np.ndarray, **filters) -> set[int]:
    """Ids drawn at evenly spread chances: every id whose share is more than one of them."""
    drawn = {choose(scores, PLAIN._replace(hash=i * (2**64 // NUM_CHANCES), **filters)) for i in range(NUM_CHANCES)}
    return {token for token in drawn if token is not None}


def naive(scores: np.ndarray, draw: Draw) -> int | None:
    if np.isnan(scores).any() or np.isinf(scores.max()):
        return None
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    if draw.greedy:
        return order[0]
    weight = [int(w) for w in weights_of(scores, scores.max(), np.float32(draw.inv_temperature))]
    if 0 < draw.top_k < len(order):
        order = order[: draw.top_k]
    if draw.top_p < 1.0:
        wanted = int(draw.top_p * float(sum(weight[i] for i in order)))
        size, total = 1, weight[order[0]]
        while total < wanted and size < len(order):
            total += weight[order[size]]
            size += 1
        order = order[:size]
    if draw.min_p > 0.0:
        order = [i for i in order if weight[i] >= int(draw.min_p * 2**40)]
    point = draw.hash * sum(weight[i] for i in order) >> 64
    for i in sorted(order):
        if weight[i] > point:
            return i
        point -= weight[i]
    raise AssertionError("the point lies behind all weights")


@given(rows, draws)
@settings(max_examples=300, deadline=None)
def test_the_definition_is_a_full_sort_and_a_walk(scores, draw):
    assert choose(scores, draw) == naive(scores, draw)


def test_draws_follow_the_distribution():
    """Chi-square over evenly spread chances would be 0; over hashed ones see tests/engine."""
    scores = np.full(1000, -30.0, dtype=np.float32)
    shares = {3: 0.5, 500: 0.3, 999: 0.2}
    scores[list(shares)] = np.log(list(shares.values()))
    drawn = [choose(scores, PLAIN._replace(hash=i * (2**64 // 1000))) for i in range(1000)]
    assert {token: drawn.count(token) for token in shares} == pytest.approx({3: 500, 500: 300, 999: 200}, abs=1)


def test_each_filter_keeps_what_it_says():
    scores = np.log(np.array([0.1, 0.4, 0.2, 0.05, 0.25], dtype=np.float32))
    assert reachable(scores) == {0, 1, 2, 3, 4}
    assert reachable(scores, top_k=2) == {1, 4}
    assert reachable(scores, top_p=0.6) == {1, 4}
    assert reachable(scores, top_p=0.66) == {1, 4, 2}
    assert reachable(scores, min_p=0.45) == {1, 2, 4}
    assert reachable(scores, top_k=3, top_p=0.9) == {1, 4, 2}
    assert reachable(scores, top_k=2, top_p=0.6) == {1}, "top_p counts what top_k left"
    assert reachable(scores, top_p=0.9, min_p=0.6) == {1, 4}


def test_filters_cut_ties_at_the_lowest_ids():
    scores = np.array([1.0, 2.0, 1.0, 1.0, -0.0, 0.0], dtype=np.float32)
    assert reachable(scores, top_k=3) == {0, 1, 2}
    assert reachable(np.zeros(4, dtype=np.float32), top_p=0.5) == {0, 1}
    assert reachable(scores[4:], top_k=1) == {0}, "zeros of both signs are equal"


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}, {"inv_temperature": 1e5}])
def test_the_narrowest_filters_leave_the_best(filters):
    scores = row(1)
    assert reachable(scores, **filters) == {int(scores.argmax())}


def test_no_rounding_at_the_end_of_a_flat_distribution():
    """Its total has more bits than float64: a top_p just below 1 asks for more than there is."""
    flat = np.zeros(20_001, dtype=np.float32)
    assert choose(flat, PLAIN._replace(top_p=1.0 - 2.0**-53, hash=2**64 - 1)) == 20_000


def test_a_mask_leaves_its_ids_alone():
    """Also behind the last whole word, and whatever the others score."""
    scores = row(1, 70)
    for ids in ({3}, {0, 31, 32, 69}, {64, 68}):
        others = np.full(70, np.nan, np.float32)
        others[list(ids)] = 1.0
        assert reachable(others, allowed=mask_of(ids, 70)) == ids
        alone = np.full(70, -np.inf, np.float32)
        alone[list(ids)] = scores[list(ids)]
        for chance in range(0, 2**64, 2**64 // 5):
            draw = PLAIN._replace(hash=chance, top_p=0.7)
            assert choose(scores, draw._replace(allowed=mask_of(ids, 70))) == choose(alone, draw)


def test_nothing_is_drawn_where_nothing_is_allowed():
    assert choose(row(1, 70), PLAIN._replace(allowed=mask_of(set(), 70))) is None


@pytest.mark.parametrize("greedy", [True, False])
def test_what_is_not_finite(greedy):
    draw = PLAIN._replace(greedy=greedy)
    for bad in (np.nan, np.inf):
        scores = row(1)
        scores[17] = bad
        assert choose(scores, draw) is None
    assert choose(np.full(5, -np.inf, dtype=np.float32), draw) is None
    alone = np.full(5, -np.inf, dtype=np.float32)
    alone[3] = -1.0
    assert choose(alone, draw) == 3
