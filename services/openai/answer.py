"""Events of a request's jobs, turned into an OpenAI answer: chunk by chunk, or whole.

Both come from the same state, so that a stream's deltas joined are the text of the whole answer, with the same
reasons and usage. How a route spells its chunks and choices is its `Shape`'s business.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from schemas import events
from schemas.errors import KvrelayError
from schemas.events import Accepted, Done, Event, Finish, Start, Token
from schemas.openai import error_body
from schemas.openai_answers import FinishReason, Usage
from services.openai import position
from services.openai.observed import Observed
from services.openai.plain_chunk import PlainChunk
from services.openai.position import DONE_SAID, ERROR_SAID, USAGE_SAID, Position
from services.text.tool_format import Call, CallReader, Read

DONE = b"[DONE]"

_encoder = msgspec.json.Encoder()


@dataclass
class Choice:
    """What has been said for one index. `tokens` are kept for their logprobs only; `length` counts characters."""

    index: int
    parts: list[str] = field(default_factory=list)
    length: int = 0
    tokens: list[Token] = field(default_factory=list)
    reason: FinishReason = "stop"
    stop: str | None = None  # the stop string that matched
    reader: CallReader | None = None  # where tools may be called
    calls: list[Call] = field(default_factory=list)
    plain: PlainChunk | None = None  # once it has said a text and nothing else

    def say(self, text: str) -> None:
        self.parts.append(text)
        self.length += len(text)

    @property
    def text(self) -> str:
        return "".join(self.parts)


@dataclass
class Head:
    """What every chunk of a stream repeats. `build` is known from the first `start` on."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))
    build: str = ""


Metrics = dict[str, float] | UnsetType
"""Seconds of each part of the work, where they are asked for; of several jobs the longest."""

Placed = tuple[Choice, int, msgspec.Struct | bytes]
"""A chunk of a choice, spelled or not yet, and the choice's position once it is said."""


class Shape(Protocol):
    """How one route spells an answer. Each chunk method returns None where the route has nothing to say.

    `with_usage`: every chunk but the last has `"usage": null`, since the client asked for usage. `has_marker`: a stream
    ends with [DONE].
    """

    has_marker: bool

    def opening(self, choice: Choice) -> msgspec.Struct | None: ...
    def piece(self, choice: Choice, text: str, token: Token | None, calls: Sequence[Call]) -> msgspec.Struct: ...
    def closing(self, choice: Choice) -> msgspec.Struct: ...
    def usage(self, usage: Usage, metrics: Metrics) -> msgspec.Struct: ...
    def whole(self, choices: list[Choice], usage: Usage, metrics: Metrics) -> msgspec.Struct: ...


class Chunk(NamedTuple):
    """`id` is where a reader is who has got it; `data` is JSON, or `[DONE]`."""

    id: str
    data: bytes


class Answer:
    """The answer to one request: `num_jobs` prompts with `n` choices each, index = prompt * n + choice.

    `seen`: what its reader has already got of it, and is not given again.
    """

    def __init__(
        self,
        head: Head,
        shape: Shape,
        num_jobs: int,
        n: int,
        logprobs: bool,
        with_usage: bool = False,
        seen: Position | None = None,
        *,
        with_metrics: bool = False,
        with_tools: bool = False,
    ) -> None:
        self.head = head
        self._shape = shape
        self._num_jobs = num_jobs
        self._n = n
        self._logprobs = logprobs
        self._with_usage = with_usage
        self._metrics: Metrics = {} if with_metrics else UNSET
        self._choices = [Choice(index, reader=CallReader() if with_tools else None) for index in range(num_jobs * n)]
        self._position = seen or Position.start(num_jobs * n)
        self._usage: list[events.Usage] = []
        self._first_token_s: float | None = None

    @property
    def is_complete(self) -> bool:
        return len(self._usage) == self._num_jobs

    @property
    def is_untold(self) -> bool:
        """Whether its reader has got nothing of it."""
        return not self._position.tail and not any(self._position.choices)

    @property
    def is_told(self) -> bool:
        """Whether its reader has got all of it."""
        return self._position.is_at_end

    def expects_tokens(self, arrived: Sequence[Event]) -> bool:
        """Whether these are tokens of choices that were asked for, and nothing else: what `add` cannot fail at."""
        for event in arrived:
            if type(event) is not Token or event.logprobs is not None or not 0 <= event.choice < self._n:
                return False
        return True

    @property
    def num_tokens(self) -> int:
        return sum(part.completion_tokens for part in self._usage)

    def observe(self, observed: Observed) -> None:
        """Writes down what has been said, for a comparison."""
        observed.texts = {choice.index: choice.text for choice in self._choices}
        observed.reasons = {choice.index: choice.reason for choice in self._choices} if self.is_complete else {}
        observed.num_tokens = self.num_tokens
        observed.error = "" if self.is_complete else "incomplete"
        if self._first_token_s is not None:
            observed.first_s = self._first_token_s - observed.began_s

    def add(self, arrived: Iterable[tuple[int, Event]]) -> list[Chunk]:
        """The chunks that these events, each with the number of its job, are worth."""
        return [
            Chunk(self._reached(choice, position), chunk if type(chunk) is bytes else _encoder.encode(chunk))
            for prompt, event in arrived
            for choice, position, chunk in self._chunks(prompt, event)
            if position > self._position.choices[choice.index]
        ]

    def begin_with(self, echoes: Sequence[str]) -> None:
        """The text that the choices of each prompt begin with, where no job's first event says it."""
        for prompt, echo in enumerate(echoes):
            for choice in self._of_prompt(prompt) if echo else ():
                choice.say(echo)

    def take(self, arrived: Iterable[tuple[int, Event]]) -> None:
        """As `add`, for who wants the answer whole."""
        for prompt, event in arrived:
            self._chunks(prompt, event)

    def ending(self) -> list[Chunk]:
        """What follows the last chunk of a complete answer."""
        found = []
        if (self._with_usage or self._metrics) and self._position.tail < USAGE_SAID:
            usage = _encoder.encode(self._shape.usage(Usage.of(self._usage), self._metrics))
            found.append(Chunk(self._reached_tail(USAGE_SAID), usage))
        reached = self._reached_tail(DONE_SAID)
        return [*found, Chunk(reached, DONE)] if self._shape.has_marker else found

    def failure(self, error: KvrelayError) -> Chunk:
        """What takes the place of an ending where the request has ended with an error."""
        return Chunk(self._reached_tail(ERROR_SAID), _encoder.encode(error_body(error)))

    def interruption(self, error: KvrelayError) -> Chunk:
        """Says why no more comes here, of an answer that goes on: whoever has got it may come back for the rest."""
        return Chunk(str(self._position), _encoder.encode(error_body(error)))

    def whole(self) -> bytes:
        return _encoder.encode(self._shape.whole(self._choices, Usage.of(self._usage), self._metrics))

    def _reached(self, choice: Choice, position: int) -> str:
        self._position.choices[choice.index] = position
        return str(self._position)

    def _reached_tail(self, tail: int) -> str:
        self._position.tail = tail
        return str(self._position)

    def _chunks(self, prompt: int, event: Event) -> list[Placed]:
        if isinstance(event, Token):
            return self._token(self._choice(prompt, event.choice), event)
        if isinstance(event, Accepted):
            self._accepted(prompt, event)
        elif isinstance(event, Start):
            return self._start(prompt, event)
        elif isinstance(event, Finish):
            return self._finish(self._choice(prompt, event.choice), event)
        elif isinstance(event, Done):
            self._usage.append(event.usage)
            if self._metrics is not UNSET:
                for name, seconds in event.timings.items():
                    self._metrics[name] = max(seconds, self._metrics.get(name, 0.0))
        return []

    def _choice(self, prompt: int, choice: int) -> Choice:
        return self._choices[prompt * self._n + choice]

    def _of_prompt(self, prompt: int) -> list[Choice]:
        return self._choices[prompt * self._n : (prompt + 1) * self._n]

    def _accepted(self, prompt: int, event: Accepted) -> None:
        if event.asked is None:
            return
        self.head.created = event.asked.created  # of a retry: the first try's
        self._forget_plain()
        if event.asked.echo:
            for choice in self._of_prompt(prompt):
                choice.say(event.asked.echo)

    def _start(self, prompt: int, event: Start) -> list[Placed]:
        """All choices of a prompt open with its job, in one write; the first job says the build."""
        self.head.build = self.head.build or event.build
        self._forget_plain()
        openings = [(choice, self._shape.opening(choice)) for choice in self._of_prompt(prompt)]
        return [(choice, position.OPENED, chunk) for choice, chunk in openings if chunk is not None]

    def _token(self, choice: Choice, event: Token) -> list[Placed]:
        if self._first_token_s is None:
            self._first_token_s = time.monotonic()
        at = position.of_token(event.index)
        if not self._logprobs and choice.reader is None:
            return self._say_plainly(choice, at, event.text) if event.text else []
        if event.logprobs is None:
            return self._say(choice, at, event.text)
        choice.tokens.append(event)
        text, calls = _read(choice, event.text)
        return [(choice, at, self._piece(choice, text, event, calls))]

    def _finish(self, choice: Choice, event: Finish) -> list[Placed]:
        choice.reason, choice.stop = event.reason, event.stop
        text, calls = _read(choice, event.text)
        if choice.reader is not None:
            text += choice.reader.finish()
        if choice.calls and event.reason == "stop":
            choice.reason = "tool_calls"
        at = position.of_last_text(event.tokens)
        said = [(choice, at, self._piece(choice, text, None, calls))] if text or calls else list[Placed]()
        return [*said, (choice, position.of_closing(event.tokens), self._shape.closing(choice))]

    def _say(self, choice: Choice, at: int, text: str) -> list[Placed]:
        """Nothing for held-back text: a delta of "" would only cost the client a wake-up."""
        text, calls = _read(choice, text)
        return [(choice, at, self._piece(choice, text, None, calls))] if text or calls else []

    def _say_plainly(self, choice: Choice, at: int, text: str) -> list[Placed]:
        choice.plain = choice.plain or PlainChunk(lambda said: self._shape.piece(choice, said, None, ()))
        choice.say(text)
        return [(choice, at, choice.plain.of(text))]

    def _forget_plain(self) -> None:
        """What every chunk repeats has changed."""
        for choice in self._choices:
            choice.plain = None

    def _piece(self, choice: Choice, text: str, token: Token | None, calls: Sequence[Call]) -> msgspec.Struct:
        chunk = self._shape.piece(choice, text, token, calls)
        choice.say(text)
        return chunk


def _read(choice: Choice, text: str) -> Read:
    """What of `text` is to be said; calls are noted."""
    if choice.reader is None:
        return Read(text, [])
    read = choice.reader.push(text)
    choice.calls += read.calls
    return read
