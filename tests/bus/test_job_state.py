"""The state of a job, told from its events and its queue message: in lives written by hand, and in random ones."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from schemas.events import Accepted, Done, Error, Event, Finish, Retry, Token, Usage
from schemas.state import STEPS, JobState
from schemas.subjects import Stage, claim
from services.bus.job_state import report_of, state_of
from tests.bus.events import START, token

ACCEPTED = Accepted(job="j", model="m")
DONE = Done(usage=Usage(prompt_tokens=3, completion_tokens=1))
CANCELLED = Error(code="cancelled", message="m")
FAILED = Error(code="poisoned", message="m")


class Message(NamedTuple):
    claim: str
    events: list[Event]
    worker: str = ""
    stored_at: float = 0.0


# By hand: a history a line, (claim, event or None for "prefill settles"), and the states that it goes through.

GATEWAY = [("", ACCEPTED), ("prefill.0.1", START), ("prefill.0.1", token(0))]
HANDED_OFF = [*GATEWAY, ("", None)]
DECODING = [*HANDED_OFF, ("decode.1.1", token(1))]
LIVES: dict[str, list[tuple[str, Event | None]]] = {
    "queued prefilling handed_off decoding done": [*DECODING, ("decode.1.1", DONE)],
    "prefilling decoding failed": [*GATEWAY[1:], ("decode.1.1", token(1)), ("", None), ("", FAILED)],
    "prefilling done": [*GATEWAY[1:], ("prefill.0.1", DONE), ("", None)],
    "prefilling handed_off prefilling decoding cancelled": [
        *HANDED_OFF[1:], ("rework.2.1", Retry(attempt=1)), ("decode.3.1", token(1)), ("", CANCELLED),
    ],
    "prefilling handed_off decoding prefilling failed": [*DECODING[1:], ("rework.2.1", token(0)), ("", FAILED)],
    "prefilling handed_off decoding cancelled": [*DECODING[1:], ("", CANCELLED)],
    "prefilling handed_off failed": [*HANDED_OFF[1:], ("", FAILED)],
    "prefilling handed_off cancelled": [*HANDED_OFF[1:], ("", CANCELLED)],
    "prefilling cancelled": [("prefill.0.2", Retry(attempt=1)), ("", CANCELLED)],
    "queued cancelled": [("", ACCEPTED), ("", CANCELLED)],
    "queued failed": [("", ACCEPTED), ("", FAILED)],
    "cancelled": [("", CANCELLED)],
    "failed": [("prefill.0.1", FAILED), ("", None)],
}  # fmt: skip


def states_of(life: list[tuple[str, Event | None]]) -> Iterator[JobState]:
    """The state before the first, and after each of the events."""
    messages: list[Message] = []
    in_queue = True
    yield state_of(messages, in_queue=in_queue)
    for claimed, event in life:
        if event is None:
            in_queue = False
        else:
            messages.append(Message(claimed, [event]))
        yield state_of(messages, in_queue=in_queue)


def steps_of(states: list[JobState]) -> list[tuple[JobState, JobState]]:
    return [(before, after) for before, after in itertools.pairwise(states) if before is not after]


@pytest.mark.parametrize("expected", LIVES)
def test_a_life(expected: str) -> None:
    steps = steps_of(list(states_of(LIVES[expected])))
    assert [after for _, after in steps] == expected.split()
    assert all(after in STEPS[before] for before, after in steps)


def test_every_step_of_the_table_happens() -> None:
    seen = {step for life in LIVES.values() for step in steps_of(list(states_of(life)))}
    assert seen == {(before, after) for before, steps in STEPS.items() for after in steps}


def test_what_nobody_can_read_tells_nothing() -> None:
    assert state_of([Message("", [])], in_queue=True) is JobState.UNKNOWN
    messages = [Message("", [ACCEPTED]), Message("not.a.claim", [Retry(attempt=1)])]
    assert state_of(messages, in_queue=True) is JobState.QUEUED


# At random: queue messages that are delivered any number of times, each delivery going on, or dying, where it likes.


class QueueMessage:
    """A job or a hand-off. Any delivery of it may still write, also late ones: the chain is all that stops them."""

    def __init__(self, stage: Stage, hop: int) -> None:
        self.stage = stage
        self.hop = hop
        self.deliveries = 0


class Lives(RuleBasedStateMachine):
    NUM_TOKENS = 3

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[Message] = []
        self.job = QueueMessage(Stage.PREFILL, 0)
        self.queued = [self.job]
        self.state = JobState.UNKNOWN
        self.started = self.finished = self.ended = False
        self.num_tokens = self.num_retries = self.last_hop = 0

    def look(self) -> None:
        """After everything that is stored or settled, so that no step hides behind another."""
        in_queue = self.job in self.queued
        before, self.state = self.state, state_of(self.messages, in_queue=in_queue)
        assert self.state is before or self.state in STEPS[before], f"{before} -> {self.state}"
        assert self.state.is_end == self.ended
        report = report_of("t", "j", self.messages, in_queue=in_queue, model="m", now=1.0)
        stored = [event for message in self.messages for event in message.events]
        assert report.state is self.state
        assert sum(choice.tokens for choice in report.choices) == sum(isinstance(event, Token) for event in stored)

    def write(self, by: str, event: Event) -> None:
        if not self.ended:  # the chain
            self.messages.append(Message(by, [event]))
            self.ended = isinstance(event, Done | Error)
            self.look()

    def settle(self, message: QueueMessage) -> None:
        self.queued.remove(message)
        self.look()

    def delivered(self, data: st.DataObject) -> tuple[QueueMessage, str]:
        """A message that is still queued, and the claim of one of its deliveries: a new one, or a late one."""
        message = data.draw(st.sampled_from(self.queued))
        number = data.draw(st.integers(1, message.deliveries + 1))
        message.deliveries = max(message.deliveries, number)
        return message, claim(message.stage, message.hop, number)

    @initialize(by_gateway=st.booleans())
    def publish(self, by_gateway: bool) -> None:
        self.look()
        if by_gateway:
            self.write("", ACCEPTED)

    @precondition(lambda self: self.queued)
    @rule(data=st.data(), num_events=st.integers(1, 5))
    def go_on(self, data: st.DataObject, num_events: int) -> None:
        message, by = self.delivered(data)
        for _ in range(num_events):
            if not self.started:
                self.started = True
                self.write(by, START)
            elif self.num_tokens < self.NUM_TOKENS and (message.stage is Stage.DECODE or not self.num_tokens):
                self.num_tokens += 1
                self.write(by, token(self.num_tokens - 1))
            elif self.num_tokens == self.NUM_TOKENS and not self.finished:
                self.finished = True
                self.write(by, Finish(choice=0, reason="length", tokens=self.num_tokens))
            elif self.finished:
                self.write(by, DONE)

    @precondition(lambda self: self.queued)
    @rule(data=st.data())
    def run_alone(self, data: st.DataObject) -> None:
        self.num_retries += 1
        self.write(self.delivered(data)[1], Retry(attempt=self.num_retries))

    @precondition(lambda self: self.queued and self.num_tokens and not self.finished)
    @rule(data=st.data(), dies=st.booleans())
    def hand_on(self, data: st.DataObject, dies: bool) -> None:
        """Prefill and rework to decode; decode to another decode worker, or to rework. Who dies settles nothing."""
        message, _ = self.delivered(data)
        stages = [Stage.DECODE, Stage.REWORK] if message.stage is Stage.DECODE else [Stage.DECODE]
        self.last_hop += 1
        self.queued.append(QueueMessage(data.draw(st.sampled_from(stages)), self.last_hop))
        if not dies:
            self.settle(message)

    @precondition(lambda self: self.queued and self.ended)
    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        self.settle(data.draw(st.sampled_from(self.queued)))

    @rule(code=st.sampled_from([*[None] * 4, "cancelled", "poisoned"]))
    def end_from_outside(self, code: str | None) -> None:
        """Seldom, or no job would get far."""
        if code is not None:
            self.write("", Error(code=code, message="m"))

    @precondition(lambda self: self.ended)
    @rule(by=st.sampled_from(["", "scribble", "decode.1.1"]))
    def scribble(self, by: str) -> None:
        """Bytes that nobody can read, behind the end."""
        self.messages.append(Message(by, []))
        self.look()


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=150, stateful_step_count=15, deadline=None)
