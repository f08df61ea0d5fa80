import pytest

from schemas.events import Accepted, Error, Finish, Retry, Token
from services.bus.order import EventOrder, Gap
from tests.bus.events import START, ending, token, whole


def test_a_whole_stream_is_accepted_once() -> None:
    order = EventOrder()
    events = [Accepted(job="j"), *whole(3)]
    assert [event for event in events + events if order.accept(event)] == events
    assert order.ended


def test_every_event_may_be_repeated_anywhere() -> None:
    order = EventOrder()
    events = [START, token(0), Retry(attempt=1), token(1), Retry(attempt=2), *ending(2)[:1]]
    seen = []
    for number, event in enumerate(events):
        seen += [repeated for repeated in [event, *events[: number + 1]] if order.accept(repeated)]
    assert seen == events


def test_a_missing_token_is_a_gap_of_its_choice() -> None:
    order = EventOrder()
    assert order.accept(token(0))
    assert order.accept(token(0, choice=1))
    assert order.accept(token(1, choice=1))
    with pytest.raises(Gap, match="choice 0: token 2 came where 1 was expected"):
        order.accept(token(2))
    assert order.accept(token(1))


def test_a_finish_after_missing_tokens_is_a_gap() -> None:
    order = EventOrder()
    order.accept(token(0))
    with pytest.raises(Gap, match="2 tokens, 1 were seen"):
        order.accept(Finish(choice=0, reason="stop", tokens=2))
    assert order.accept(Token(choice=0, index=1, id=1, text=""))
    assert order.accept(Finish(choice=0, reason="stop", tokens=2))


def test_nothing_follows_an_end() -> None:
    order = EventOrder()
    assert order.accept(Error(code="cancelled", message="by its owner"))
    assert not order.accept(token(0))
    assert not order.accept(ending(0)[1])
