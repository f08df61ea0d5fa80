"""Positions in an answer survive being spelled."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import InvalidRequest
from services.openai.position import Position


@given(st.lists(st.integers(0, 8_194), min_size=1, max_size=300), st.integers(0, 3))
def test_spelled_and_read(choices: list[int], tail: int) -> None:
    made = Position(choices, tail)
    assert Position.parse(str(made), len(choices)) == made


def test_short_while_all_go_on_together() -> None:
    assert str(Position([12] * 128)) == "12x128"


@given(st.text(alphabet="0123456789x,+", max_size=40))
def test_what_is_none_is_refused(text: str) -> None:
    try:
        assert len(Position.parse(text, 3).choices) == 3
    except InvalidRequest as error:
        assert error.param == "Last-Event-ID"


@pytest.mark.parametrize("text", ["5x99999", "1," * 5000 + "1"])
def test_long_ones_cost_nothing(text: str) -> None:
    with pytest.raises(InvalidRequest):
        Position.parse(text, 2)
