"""The oracle sees what it is there for: each way in which a stream can be wrong."""

import pytest

from schemas.events import Done, Error, Event, Finish, Start, Token, Usage, encode_events
from services.bus.history import StoredEvents
from tests.chaos import oracle

START = Start(job="j", origin="1-1", digest="d", build="b", seed=1, prompt_tokens=1, cached_tokens=0)
TOKENS = [Token(choice=0, index=index, id=10 + index, text=str(index)) for index in range(3)]
FINISH = Finish(choice=0, reason="length", tokens=3)
DONE = Done(usage=Usage(prompt_tokens=1, completion_tokens=3))
GOOD: list[Event] = [START, *TOKENS, FINISH, DONE]


def stream(events: list[Event], claims: str = "") -> oracle.Stream:
    """One event a message; `claims` has a letter for each: p prefill, a and b two deliveries of decode."""
    names = {"p": "prefill.0.1", "a": "decode.0.1", "b": "decode.0.2"}
    letters = claims or "p" * len(events)
    return oracle.stream_of(
        "j",
        [
            StoredEvents(number + 1, names[letter], encode_events([event]), float(number))
            for number, (letter, event) in enumerate(zip(letters, events, strict=True))
        ],
    )


@pytest.mark.parametrize(
    "events",
    [
        [START, TOKENS[0], TOKENS[2], FINISH, DONE],
        [START, TOKENS[0], TOKENS[0], TOKENS[1], FINISH, DONE],
        [START, TOKENS[1], TOKENS[0], TOKENS[2], FINISH, DONE],
        [*GOOD, DONE],
        [*GOOD, Error(code="cancelled", message="too late")],
        [START, *GOOD],
        [START, *TOKENS, FINISH, FINISH, DONE],
        [START, TOKENS[0], FINISH, TOKENS[1], DONE],
    ],
    ids=[
        "gap",
        "twice",
        "order",
        "two ends",
        "end behind the end",
        "two starts",
        "two finishes",
        "token behind finish",
    ],
)
def test_a_stream_of_a_wrong_form_is_found(events: list[Event]) -> None:
    with pytest.raises(AssertionError):
        stream(events)


@pytest.mark.parametrize(
    "events",
    [
        [START, TOKENS[0], Token(choice=0, index=1, id=99, text="1"), TOKENS[2], FINISH, DONE],
        [START, *TOKENS[:2], Token(choice=0, index=2, id=12, text="?"), FINISH, DONE],
        [START, *TOKENS[:2], FINISH, DONE],
        [START, *TOKENS, Finish(choice=0, reason="stop", tokens=3), DONE],
        [START, *TOKENS, DONE],
        [START, *TOKENS, FINISH],
        [START, *TOKENS, FINISH, Error(code="internal", message="?")],
    ],
    ids=["id", "text", "short", "reason", "no finish", "no end", "error"],
)
def test_a_stream_that_differs_is_found(events: list[Event]) -> None:
    oracle.check_equal("j", stream(GOOD), stream(GOOD))
    with pytest.raises(AssertionError):
        oracle.check_equal("j", stream(events), stream(GOOD))


def test_a_beginning_is_one_only_if_all_of_it_is_right() -> None:
    cut = [START, *TOKENS[:2], Error(code="cancelled", message="its gateway died")]
    assert oracle.is_beginning(stream(cut), stream(GOOD))
    assert oracle.is_beginning(stream(cut[:1]), stream(GOOD))
    assert not oracle.is_beginning(stream([START, Token(choice=0, index=0, id=99, text="0")]), stream(GOOD))
    assert not oracle.is_beginning(stream([START, Token(choice=1, index=0, id=10, text="0")]), stream(GOOD))


def test_only_tokens_of_two_decode_deliveries_make_a_take_over() -> None:
    assert not stream(GOOD, "ppaaaa").taken_over
    assert not stream(GOOD, "ppppab").taken_over
    assert stream(GOOD, "ppabbb").taken_over


def test_the_longest_silence_is_told() -> None:
    assert stream(GOOD).longest_silence_s == 1.0
