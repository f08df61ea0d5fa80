"""The table of steps: ends are final, and what a looker may see is what the steps allow."""

import pytest

from schemas.job_report import JobReport, joined
from schemas.state import STEPS, JobState, may_become

ENDS = {JobState.DONE, JobState.FAILED, JobState.CANCELLED}


def test_every_state_is_in_the_table_and_only_ends_are_final() -> None:
    assert set(STEPS) == set(JobState)
    assert {state for state in JobState if state.is_end} == ENDS
    assert all(state not in steps for state, steps in STEPS.items()), "staying is no step"


@pytest.mark.parametrize("state", [state for state in JobState if state not in ENDS])
def test_every_job_can_still_end_in_every_way_and_is_never_unknown_again(state: JobState) -> None:
    assert all(may_become(state, end) for end in ENDS)
    assert may_become(state, state)
    assert all(JobState.UNKNOWN not in steps for steps in STEPS.values())


@pytest.mark.parametrize("end", sorted(ENDS))
def test_nothing_follows_an_end(end: JobState) -> None:
    assert [state for state in JobState if may_become(end, state)] == [end]


def test_a_job_that_was_begun_is_not_queued_again() -> None:
    begun = (JobState.PREFILLING, JobState.HANDED_OFF, JobState.DECODING)
    assert not any(may_become(state, JobState.QUEUED) for state in begun)
    assert all(may_become(one, other) for one in begun for other in begun)


@pytest.mark.parametrize(
    ("states", "whole"),
    [
        (["done", "done"], "done"),
        (["done", "decoding"], "decoding"),
        (["failed", "queued", "done"], "queued"),
        (["done", "cancelled"], "cancelled"),
        (["failed", "cancelled", "done"], "failed"),
    ],
)
def test_the_state_of_a_request_with_several_jobs(states: list[str], whole: str) -> None:
    jobs = [JobReport(id=str(n), tenant="t", state=JobState(state)) for n, state in enumerate(states)]
    assert joined("r", jobs).state == whole
