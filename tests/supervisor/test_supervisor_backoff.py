"""Who keeps dying is given up; who was killed, or worked for a while, is not."""

from services.supervisor.backoff import (
    FIRST_DELAY_S,
    MAX_DELAY_S,
    MAX_FAILED_STARTS,
    MAX_KILLED,
    SETUP_EXIT_CODE,
    STABLE_S,
    Backoff,
)


def test_delays_double_up_to_a_bound_and_then_it_is_given_up() -> None:
    backoff = Backoff()
    delays = [backoff.died(1, 0.5) for _ in range(MAX_FAILED_STARTS)]
    assert delays == [FIRST_DELAY_S * 2**i for i in range(MAX_FAILED_STARTS - 1)] + [None]


def test_ten_kills_in_a_row_are_borne() -> None:
    backoff = Backoff()
    delays = [backoff.died(-9, 3.0) for _ in range(10)]
    assert None not in delays
    assert max(delay for delay in delays if delay is not None) == MAX_DELAY_S


def test_being_killed_for_ever_is_not_borne_for_ever() -> None:
    backoff = Backoff()
    assert [backoff.died(-11, 1.0) for _ in range(MAX_KILLED)][-1] is None


def test_a_stable_life_forgives() -> None:
    backoff = Backoff()
    for _ in range(100):
        assert backoff.died(1, STABLE_S) == FIRST_DELAY_S


def test_wrong_settings_do_not_heal() -> None:
    assert Backoff().died(SETUP_EXIT_CODE, 0.3) is None
    assert Backoff().died(SETUP_EXIT_CODE, STABLE_S) is not None


def test_who_was_told_to_go_is_replaced_at_once_however_often() -> None:
    backoff = Backoff()
    assert {backoff.died(0, 3.0) for _ in range(100)} == {FIRST_DELAY_S}
    assert backoff.died(1, 0.5) == FIRST_DELAY_S


def test_a_broker_that_is_away_for_a_minute_is_borne_by_who_has_worked_before() -> None:
    backoff = Backoff()
    assert backoff.died(-9, STABLE_S) is not None
    outage_s = 0.0
    while outage_s < 60.0:
        delay_s = backoff.died(SETUP_EXIT_CODE, 5.0)  # no NATS server answers
        assert delay_s is not None
        outage_s += 5.0 + delay_s
