import pytest

from services.bus import progress as progress_module
from services.bus.progress import STALL_S, Progress


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(progress_module, "elapsed_s", fake)
    return fake


def test_a_worker_without_work_never_stands_still(clock: Clock) -> None:
    progress = Progress()
    clock.now += 1000
    assert not progress.stands_still()
    progress.step()
    progress.rest()
    clock.now += 1000
    assert not progress.stands_still()


def test_a_step_that_does_not_end_is_noticed(clock: Clock) -> None:
    progress = Progress()
    progress.begin()
    clock.now += STALL_S
    assert not progress.stands_still()
    clock.now += 0.1
    assert progress.stands_still()
    progress.step()
    assert not progress.stands_still()


def test_slow_steps_are_given_ten_times_their_usual_time(clock: Clock) -> None:
    progress = Progress()
    progress.begin()
    for _ in range(100):
        clock.now += 3.0
        progress.step()
    clock.now += 25.0
    assert not progress.stands_still()
    clock.now += 6.0
    assert progress.stands_still()
