"""Guesses go on where the last tokens went on before; and how often they come true is known without trying them."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.drafter import NGRAMS, Drafter
from services.engine.speculation import NO_MARGIN, share_out
from services.engine.step_cost import StepCost
from tests.engine.requests import CheapRows


def test_a_guess_goes_on_as_it_did_before():
    drafter = Drafter([1, 2, 3, 4, 5, 6, 7, 2, 3])
    assert drafter.draft(3) == [4, 5, 6]
    assert len(drafter.chances(3)) == 3


def test_the_longer_match_counts_and_of_equals_the_last():
    assert Drafter([1, 2, 3, 9, 2, 3, 8, 1, 2, 3]).draft(1) == [9]
    assert Drafter([5, 2, 3, 9, 6, 2, 3, 8, 7, 2, 3]).draft(1) == [8]


def test_no_guess_without_a_match():
    drafter = Drafter([1, 2, 3, 4])
    assert drafter.draft(4) == [] and drafter.chances(4) == []


def test_a_guess_runs_into_itself():
    assert Drafter([7, 8, 9, 7, 8, 9]).draft(7) == [7, 8, 9, 7, 8, 9, 7]
    assert Drafter([1, 1, 1]).draft(3) == [1, 1, 1]


def test_a_match_is_followed_while_it_comes_true():
    """[2, 3] went on with 9 lately, but what is being repeated is the longer passage before."""
    tokens = [1, 2, 3, 4, 2, 3, 5, 6, 0, 2, 3, 9, 1, 2, 3]
    drafter = Drafter(tokens)
    for token in (4, 2, 3, 5):
        assert drafter.draft(1) == [token]
        tokens.append(token)
    tokens.append(0)
    assert drafter.draft(1) != [6]


def test_chances_follow_what_came_true():
    tokens = [1, 2, 3, 4, 5, 6] * 2
    drafter = Drafter(tokens)
    before = drafter.chances(1)[0]
    tokens += [1, 2, 3, 4, 5, 6] * 10
    copying = drafter.chances(1)[0]
    assert copying > 0.9 > before
    for number in range(50):  # the same two tokens, and then each time another
        tokens += [1, 2, 100 + number]
        drafter.chances(1)
    tokens += [1, 2]
    assert drafter.chances(1)[0] < 0.2


@given(st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(0, 3), max_size=60))
@settings(max_examples=200, deadline=None)
def test_what_is_read_bit_by_bit_is_indexed_like_a_prompt(first, more):
    """And a fresh guess is what the definition says: the last place of the longest match."""
    tokens = list(first)
    drafter = Drafter(tokens)
    for token in more:
        tokens.append(token)
        drafter.chances(1)
    assert drafter._after == Drafter(tokens)._after
    found = Drafter(tokens).draft(1)
    for n in NGRAMS:
        places = [at for at in range(n, len(tokens)) if tokens[at - n : at] == tokens[-n:]]
        if places:
            assert found == [tokens[places[-1]]]
            return
    assert found == []


def test_rows_go_to_the_likeliest_guesses_while_they_pay():
    cost = CheapRows(0.2)  # of a pass that takes 1 s
    assert share_out([[0.9, 0.8, 0.7, 0.1]], 1, 1, cost, 99) == [3]
    assert share_out([[0.2, 0.1]], 1, 1, cost, 99) == [0]
    assert share_out([[0.3], [0.95, 0.9], []], 3, 3, CheapRows(0.1), 99) == [0, 2, 0]
    assert share_out([[0.9] * 3] * 16, 16, 16, cost, 99) == [0] * 16, "a row costs as much as it brings"
    assert share_out([[1.0]], 1, 1, StepCost(), 99) == [0], "nobody knows what it costs"
    assert share_out([[0.9, 0.8, 0.7], [0.95, 0.6]], 2, 2, CheapRows(0.01), 3) == [2, 1], (
        "the likeliest that there is room for"
    )
    assert share_out([[0.9, 0.8]], 1, 1, cost, 0) == [0]


def test_what_is_certain_needs_no_margin_among_those_who_have_it():
    cost, guesses = CheapRows(0.09), [[1.0, 1.0], [0.99], *[[]] * 8]
    assert share_out(guesses, 10, 10, cost, 99) == [0] * 10
    assert share_out(guesses, 10, 10, cost, 99, certain=NO_MARGIN) == [2, *[0] * 9]


def test_a_line_is_found_in_noise_and_followed():
    cost = StepCost()
    for number in range(60):
        cost.note(1 + number % 5, 0.010 + 0.002 * (1 + number % 5) + 0.0003 * (number % 3))
    assert 0.0018 < cost.row_s < 0.0022 and 0.011 < cost.seconds(1) < 0.013
    for number in range(200):
        cost.note(1 + number % 5, 0.020 + 0.001 * (1 + number % 5))
    assert 0.0009 < cost.row_s < 0.0011 and 0.020 < cost.seconds(1) < 0.022


def test_rows_of_one_count_keep_the_slope_that_was_found():
    cost = StepCost()
    for number in range(60):
        cost.note(1 + number % 5, 0.010 + 0.002 * (1 + number % 5))
    for _ in range(300):
        cost.note(1, 0.012)
    assert 0.0015 < cost.row_s < 0.0025
    cost.note(1, 50.0)  # the machine was asleep
    assert cost.seconds(1) < 0.02


def test_large_passes_say_nothing():
    cost = StepCost()
    cost.note(1000, 1.0)
    assert not cost.is_known
