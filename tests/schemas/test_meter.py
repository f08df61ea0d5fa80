"""Buckets that can be added keep percentiles within 5 %, and meters subtract what they add."""

import math

from hypothesis import given
from hypothesis import strategies as st

from schemas.meter import Buckets, Meter, bucket_of, percentiles_s

latencies = st.lists(st.floats(2e-6, 1e4), min_size=1, max_size=100)


def counted(values: list[float]) -> Buckets:
    found: Buckets = {}
    for value in values:
        found[bucket_of(value)] = found.get(bucket_of(value), 0) + 1
    return found


@given(latencies, st.floats(0.01, 1.0))
def test_percentiles_are_within_five_per_cent(values: list[float], share: float) -> None:
    (found,) = percentiles_s(counted(values), [share])
    true = sorted(values)[max(1, math.ceil(share * len(values))) - 1]
    assert found is not None and abs(found / true - 1) <= 0.05


@given(latencies, latencies)
def test_what_is_added_can_be_taken_away(ours: list[float], theirs: list[float]) -> None:
    first = Meter(asked_tokens=3, generated_tokens=len(ours), itl=counted(ours))
    second = Meter(asked_tokens=4, hit_tokens=2, generated_tokens=len(theirs), itl=counted(theirs), ttft={3: 1})
    both = first.plus(second)
    assert both.itl == counted(ours + theirs) and both.generated_tokens == len(ours + theirs)
    assert both.since(second) == first and both.since(both) == Meter()


def test_nothing_counted_and_nothing_taken() -> None:
    assert percentiles_s({}, [0.5, 0.99]) == [None, None]
    assert bucket_of(0.0) == bucket_of(-1.0) == 0
