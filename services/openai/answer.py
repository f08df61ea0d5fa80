"""Events of a request's jobs, turned into an OpenAI answer: chunk by chunk, or whole.

Both come from the same state, so that a stream's deltas joined are the text of the whole answer, with the same
reasons and usage. How a route spells its chunks and choices is its `Shape`'s business.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from schemas import events
from schemas.events import Done, Event, Finish, Start, Token
from schemas.openai_answers import FinishReason, Usage

_encoder = msgspec.json.Encoder()


@dataclass
class Choice:
    """What has been said for one index. `tokens` are kept for their logprobs only; `length` counts characters."""

    index: int
    parts: list[str] = field(default_factory=list)
    length: int = 0
    tokens: list[Token] = field(default_factory=list)
    reason: FinishReason = "stop"

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


class Shape(Protocol):
    """How one route spells an answer. Each chunk method returns None where the route has nothing to say.

    `with_usage`: every chunk but the last has `"usage": null`, since the client asked for usage.
    """

    def opening(self, choice: Choice) -> msgspec.Struct | None: ...
    def piece(self, choice: Choice, text: str, token: Token | None) -> msgspec.Struct: ...
    def closing(self, choice: Choice) -> msgspec.Struct: ...
    def usage(self, usage: Usage) -> msgspec.Struct: ...
    def whole(self, choices: list[Choice], usage: Usage) -> msgspec.Struct: ...


class Answer:
    """The answer to one request: `num_jobs` prompts with `n` choices each, index = prompt * n + choice."""

    def __init__(self, head: Head, shape: Shape, num_jobs: int, n: int, logprobs: bool) -> None:
        self.head = head
        self._shape = shape
        self._num_jobs = num_jobs
        self._n = n
        self._logprobs = logprobs
        self._choices = [Choice(index) for index in range(num_jobs * n)]
        self._usage: list[events.Usage] = []
        self._opened = False

    @property
    def is_complete(self) -> bool:
        return len(self._usage) == self._num_jobs

    @property
    def num_tokens(self) -> int:
        return sum(part.completion_tokens for part in self._usage)

    def add(self, arrived: Iterable[tuple[int, Event]]) -> list[bytes]:
        """The chunks that these events, each with the number of its job, are worth, as JSON."""
        chunks = [chunk for prompt, event in arrived for chunk in self._chunks(prompt, event)]
        return [_encoder.encode(chunk) for chunk in chunks]

    def _chunks(self, prompt: int, event: Event) -> list[msgspec.Struct]:
        if isinstance(event, Token):
            return self._token(self._choice(prompt, event.choice), event)
        if isinstance(event, Start):
            return self._start(event)
        if isinstance(event, Finish):
            return self._finish(self._choice(prompt, event.choice), event)
        if isinstance(event, Done):
            self._usage.append(event.usage)
        return []

    def usage_chunk(self) -> bytes:
        return _encoder.encode(self._shape.usage(Usage.of(self._usage)))

    def whole(self) -> bytes:
        return _encoder.encode(self._shape.whole(self._choices, Usage.of(self._usage)))

    def _choice(self, prompt: int, choice: int) -> Choice:
        return self._choices[prompt * self._n + choice]

    def _start(self, event: Start) -> list[msgspec.Struct]:
        """The first job to start opens all choices: one write, and the head of the answer says the build."""
        if self._opened:
            return []
        self._opened = True
        self.head.build = event.build
        openings = (self._shape.opening(choice) for choice in self._choices)
        return [chunk for chunk in openings if chunk is not None]

    def _token(self, choice: Choice, event: Token) -> list[msgspec.Struct]:
        if not self._logprobs or event.logprobs is None:
            return self._say(choice, event.text)
        choice.tokens.append(event)
        chunk = self._shape.piece(choice, event.text, event)
        choice.say(event.text)
        return [chunk]

    def _finish(self, choice: Choice, event: Finish) -> list[msgspec.Struct]:
        choice.reason = event.reason
        return [*self._say(choice, event.text), self._shape.closing(choice)]

    def _say(self, choice: Choice, text: str) -> list[msgspec.Struct]:
        """Nothing for held-back text: a delta of "" would only cost the client a wake-up."""
        if not text:
            return []
        chunk = self._shape.piece(choice, text, None)
        choice.say(text)
        return [chunk]
