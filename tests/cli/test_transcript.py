"""What a person sees of a job's events."""

import io

import pytest

from schemas.errors import ContextLengthExceeded
from schemas.events import Accepted, Done, Error, Event, Finish, Start, Token, Usage
from services.cli.transcript import Transcript

START = Start(job="a", origin="1", digest="d", build="b", seed=1, prompt_tokens=37, cached_tokens=0)
DONE = Done(usage=Usage(prompt_tokens=37, completion_tokens=4, cached_tokens=36))


def shown(events: list[Event], num_choices: int = 1) -> tuple[str, Transcript]:
    out = io.StringIO()
    transcript = Transcript(out, num_choices)
    for event in events:
        transcript.take(event)
    return out.getvalue(), transcript


def token(choice: int, index: int, text: str) -> Token:
    return Token(choice=choice, index=index, id=5, text=text)


def test_one_answer_is_its_text_with_what_was_held_back() -> None:
    events = [
        Accepted(job="a"),
        START,
        token(0, 0, "日"),
        token(0, 1, ""),
        Finish(choice=0, reason="stop", text="本", tokens=2),
    ]
    out, transcript = shown([*events, DONE])
    assert out == "日本\n"
    assert transcript.text == "日本"
    assert "37 prompt tokens (36 cached), 4 tokens (stop)" in transcript.summary()


def test_several_answers_are_not_mixed() -> None:
    events = [START, token(1, 0, "b"), token(0, 0, "a"), Finish(choice=1, reason="stop", tokens=1)]
    out, _ = shown([*events, Finish(choice=0, reason="length", text="!", tokens=1), DONE], num_choices=2)
    assert out == "[1] b\n[0] a!\n"


def test_an_error_event_is_raised_as_the_error_that_it_describes() -> None:
    with pytest.raises(ContextLengthExceeded, match="too long"):
        shown([Error(code="context_length_exceeded", message="too long")])
