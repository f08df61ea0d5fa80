"""A take-over at any point goes on with the very events that an undisturbed run would have made."""

from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.events import Done, Event, Finish, Logprobs, Token
from schemas.job import Sampling
from services.engine.sampler import Sampled
from services.worker.history import History
from services.worker.stream import JobStream
from tests.gateway.tiny_model import EOS, tiny_text, token_id

TEXT = tiny_text()
PIECES = ["a", "b", "ab", "é", "日本", "🎉", "STOP", "aab"]  # characters of one to four tokens each
STOPS = ["ab", "aab", "日", "STOP", "é🎉"]


class Message(NamedTuple):
    sequence: int
    claim: str
    events: list[Event]


def sampled(text: str, cut: int) -> list[Sampled]:
    """A token a byte; without its last `cut` bytes the text may end in half a character."""
    data = text.encode()[: max(1, len(text.encode()) - cut)]
    return [Sampled(token_id(byte), Logprobs(logprob=-float(n))) for n, byte in enumerate(data)]


tokens_of_a_choice = st.builds(
    lambda pieces, cut, ends: sampled("".join(pieces), cut) + [Sampled(EOS, None)] * ends,
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=8),
    st.integers(0, 3),
    st.booleans(),
)


class Run:
    """One delivery: pushes the tokens that the model would make, choice by choice in turn, until all are finished."""

    def __init__(self, sampling: Sampling, history: History) -> None:
        self.messages: list[list[Event]] = []
        self.stream = JobStream(lambda *events: self.messages.append(list(events)), TEXT, sampling, history)

    def go_on(self, tokens: list[list[Sampled]]) -> None:
        while not self.stream.finished:
            for choice in self.stream.choices:
                if not choice.finished:
                    own = tokens[choice.number]
                    self.stream.push(choice, own[len(choice.token_ids) % len(own)])
        self.stream.end(3, 0, {})


@settings(deadline=None, max_examples=150)
@given(
    tokens=st.lists(tokens_of_a_choice, min_size=2, max_size=2),
    stop=st.lists(st.sampled_from(STOPS), max_size=2),
    max_tokens=st.integers(1, 24),
    data=st.data(),
)
def test_replayed_equals_live(tokens: list[list[Sampled]], stop: list[str], max_tokens: int, data: st.DataObject):
    sampling = Sampling(n=2, stop=stop, max_tokens=max_tokens, seed=1)
    live = Run(sampling, History())
    live.go_on(tokens)
    events = [event for message in live.messages for event in message]
    kept = data.draw(st.integers(0, len(events)), label="events stored before the crash")
    history = History.of([Message(n + 1, "decode.1.1", [event]) for n, event in enumerate(events[:kept])])
    # The hand-off knows each choice's first token, which the broker may have lost.
    first = [(number, own[0]) for number, own in enumerate(tokens)]
    if history.end is not None:
        return
    resumed = Run(sampling, history)
    resumed.stream.replay(first)
    resumed.go_on(tokens)
    after = [event for message in resumed.messages for event in message]
    assert by_choice(events[:kept] + after) == by_choice(events)
    assert isinstance(after[-1], Done) and after[-1] == events[-1]
    assert [choice.first_logprobs for choice in resumed.stream.choices] == [own[0].logprobs for own in tokens]


def by_choice(events: list[Event]) -> list[Event]:
    """Two choices may take turns otherwise; within a choice every event has its place."""
    kept = [event for event in events if isinstance(event, (Token, Finish))]
    return sorted(kept, key=lambda event: event.choice)


def test_a_stop_string_held_back_over_the_crash_is_still_found():
    sampling = Sampling(stop=["STOP"], max_tokens=20, seed=1)
    stored: list[Event] = [
        Token(choice=0, index=0, id=token_id(ord("x")), text="x"),
        Token(choice=0, index=1, id=token_id(ord("S")), text=""),
        Token(choice=0, index=2, id=token_id(ord("T")), text=""),
    ]
    run = Run(sampling, History.of([Message(1, "decode.1.1", stored)]))
    run.stream.replay([(0, Sampled(token_id(ord("x")), None))])
    assert run.messages == [], "what is stored is not published again"
    for char in "OP":
        run.stream.push(run.stream.choices[0], Sampled(token_id(ord(char)), None))
    last = run.messages[-1][-1]
    assert isinstance(last, Finish) and last.stop == "STOP" and last.text == "" and last.tokens == 5
