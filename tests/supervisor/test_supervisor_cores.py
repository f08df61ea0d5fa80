"""No two workers share a core while there are enough."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import SetupError
from services.settings import parse_cores
from services.supervisor import cores


def test_lists_and_ranges_of_cores() -> None:
    assert parse_cores("0,2-4,3") == [0, 2, 3, 4]
    assert parse_cores("") == []


@pytest.mark.parametrize("text", ["a", "1-", "-1", "1;2"])
def test_what_is_no_list_of_cores_is_refused(text: str) -> None:
    with pytest.raises(SetupError, match=r"compute\.cores"):
        parse_cores(text)


def test_two_workers_on_two_cores_own_one_each() -> None:
    assert cores.share([0, 1], 2) == ["0", "1"]


@given(st.sets(st.integers(0, 300), min_size=1, max_size=64), st.integers(1, 20))
def test_shares_are_even_and_disjoint_and_leave_no_core_idle(have: set[int], num_workers: int) -> None:
    shares = [parse_cores(share) for share in cores.share(sorted(have), num_workers)]
    assert len(shares) == num_workers
    sizes = [len(share) for share in shares]
    assert min(sizes) >= 1
    if len(have) >= num_workers:
        assert max(sizes) - min(sizes) <= 1
        assert sorted(core for share in shares for core in share) == sorted(have)
    else:
        assert sizes == [1] * num_workers


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_cores_that_the_machine_lacks_are_named() -> None:
    with pytest.raises(SetupError, match=r"compute\.cores = '4000'"):
        cores.own("4000")
