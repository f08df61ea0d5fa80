"""What a stream must be, whatever happened: the undisturbed run's tokens, each once, in order, with one end.

Reads the replies stream itself, message by message, and not what some reader made of it.
"""

import asyncio
import itertools
from dataclasses import dataclass, field

from schemas.errors import BusUnavailable
from schemas.events import Accepted, Done, Error, Event, Finish, Retry, Start, Token, is_end
from schemas.subjects import DEFAULT_TENANT, Stage
from services.bus.connection import Bus
from services.bus.history import StoredEvents, read_all

RETRY_S = 0.2
END_AGAIN_S = 15.0


@dataclass
class Choice:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: Finish | None = None


@dataclass
class Stream:
    """A job's stored messages, checked for their form."""

    choices: dict[int, Choice]
    end: Done | Error | None
    taken_over: bool = False  # tokens lie under two claims of decode
    longest_silence_s: float = 0.0  # between two messages

    @property
    def texts(self) -> dict[int, str]:
        return {number: choice.text for number, choice in self.choices.items()}


async def stored_stream(bus: Bus, job: str) -> Stream:
    """Waits until the broker can be asked."""
    while True:
        try:
            return stream_of(job, await read_all(bus, DEFAULT_TENANT, job))
        except BusUnavailable:
            await asyncio.sleep(RETRY_S)


async def ended_stream(bus: Bus, job: str) -> Stream:
    """The same, of a job whose end was shown: a broker that crashed right after that is told it again by the worker."""
    for _ in range(int(END_AGAIN_S / RETRY_S)):
        stream = await stored_stream(bus, job)
        if stream.end is not None:
            break
        await asyncio.sleep(RETRY_S)
    return stream


def stream_of(job: str, messages: list[StoredEvents]) -> Stream:
    """Raises `AssertionError` where an event is missing, doubled, out of order or behind the end."""
    stream = Stream({}, None)
    num_starts = 0
    for message in messages:
        for event in message.events:
            assert stream.end is None, f"{job}: {event} behind its end {stream.end}"
            num_starts += isinstance(event, Start)
            _add(job, stream, event)
    assert num_starts <= 1, f"{job}: {num_starts} starts"
    writers = {m.claim for m in messages if m.claim.startswith(f"{Stage.DECODE}.") and _has_token(m)}
    stream.taken_over = len(writers) > 1
    gaps_s = [after.stored_at - before.stored_at for before, after in itertools.pairwise(messages)]
    stream.longest_silence_s = max(gaps_s, default=0.0)
    return stream


def _has_token(message: StoredEvents) -> bool:
    return any(isinstance(event, Token) for event in message.events)


def _add(job: str, stream: Stream, event: Event) -> None:
    if isinstance(event, Token):
        choice = stream.choices.setdefault(event.choice, Choice())
        assert choice.finish is None, f"{job}: a token behind the finish of choice {event.choice}"
        assert event.index == len(choice.token_ids), f"{job}: {event} where {len(choice.token_ids)} comes next"
        choice.token_ids.append(event.id)
        choice.text += event.text
    elif isinstance(event, Finish):
        choice = stream.choices.setdefault(event.choice, Choice())
        assert choice.finish is None, f"{job}: choice {event.choice} finishes twice"
        choice.finish = event
        choice.text += event.text
    elif is_end(event):
        stream.end = event  # type: ignore[assignment]
    else:
        assert isinstance(event, (Accepted, Start, Retry)), event


def check_equal(job: str, stream: Stream, reference: Stream) -> None:
    """Token ids, texts, finishes and the kind of end."""
    assert isinstance(stream.end, Done), f"{job} ended with {stream.end}"
    assert stream.choices == reference.choices, f"{job}: {_difference(stream, reference)}"


def is_beginning(stream: Stream, reference: Stream) -> bool:
    """Whether a stream that was cancelled is a beginning of the undisturbed one."""
    return all(
        number in reference.choices
        and choice.token_ids == reference.choices[number].token_ids[: len(choice.token_ids)]
        and choice.finish in (None, reference.choices[number].finish)
        for number, choice in stream.choices.items()
    )


def _difference(stream: Stream, reference: Stream) -> str:
    for number, choice in reference.choices.items():
        found = stream.choices.get(number, Choice())
        if found != choice:
            pairs = zip(found.token_ids, choice.token_ids, strict=False)
            same = next(
                (i for i, (a, b) in enumerate(pairs) if a != b), min(len(found.token_ids), len(choice.token_ids))
            )
            return f"choice {number} differs from token {same} on: {found} instead of {choice}"
    return "another number of choices"
