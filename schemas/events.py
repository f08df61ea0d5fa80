"""The events on a job's reply subject: JSON lines, one or more a message.

Order in a job: accepted? start token* (finish per choice) done, with a retry anywhere, or an error at any point;
nothing follows the end. Readers skip types that they do not know. The text of a choice's tokens and of its finish,
joined, is exactly the decoded text.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from schemas.asked import Asked
from schemas.errors import InvalidRequest, KvrelayError
from schemas.wire import WIRE_VERSION, translate

FinishReason = Literal["stop", "length"]


class Logprobs(msgspec.Struct, frozen=True):
    """Natural logarithms. `top`: (token id, logprob), best first, as many as the job asked for."""

    logprob: float
    top: list[tuple[int, float]] = []


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens. `cached_tokens` of the prompt were found in the store by prefill."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Accepted(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="accepted"):
    """First event of a job that came through the gateway; `job` is its id, `model` the slug of its queue.

    `asked`: the HTTP request behind it, for whoever resumes its answer.
    """

    v: int = WIRE_VERSION
    job: str
    model: str | None = None
    asked: Asked | None = None


class Start(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="start"):
    """`origin` names the queue message, `digest` what it asked for: together they tell a repeat from a conflict."""

    v: int = WIRE_VERSION
    job: str
    origin: str
    digest: str
    build: str
    seed: int
    prompt_tokens: int
    cached_tokens: int


class Retry(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="retry"):
    """A delivery died without a new event; the job now runs alone in a worker. `attempt` counts from 1.

    Only such lone runs can condemn a job (`poisoned`): who merely shared a worker with the culprit leaves no mark.
    `attempt` counts those that speak against the job, so it may also come again, or be less than before.
    """

    attempt: int


class Token(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="token", omit_defaults=True):
    """`text` is what this token released, perhaps "": half a character or a possible stop string is held back."""

    choice: int
    index: Annotated[int, Meta(ge=0)]
    id: int
    text: str
    logprobs: Logprobs | None = None


class Finish(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="finish"):
    """End of one choice. `stop` is the stop string that matched; `text` what was still held back."""

    choice: int
    reason: FinishReason
    stop: str | None = None
    text: str = ""
    tokens: int


class Done(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="done"):
    """End of a job that went well. `timings` are seconds, as the first delivery measured them."""

    usage: Usage
    timings: dict[str, float] = {}


class Error(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="error"):
    """End of a job that did not. `origin` names the queue message whose error it is, where `start` may be missing to
    tell: another message under the same id was not answered by it."""

    code: str
    message: str
    param: str | None = None
    origin: str | None = None

    @classmethod
    def of(cls, error: KvrelayError, origin: str | None = None) -> "Error":
        return cls(code=error.code, message=error.message, param=error.param, origin=origin)


Event = Accepted | Start | Retry | Token | Finish | Done | Error
End = Done | Error

_decoder = msgspec.json.Decoder(Event)
_encoder = msgspec.json.Encoder()


def is_end(event: Event) -> bool:
    return isinstance(event, (Done, Error))


def encode_events(events: list[Event]) -> bytes:
    return b"\n".join(map(_encoder.encode, events))


def decode_events(payload: bytes) -> list[Event]:
    """The events of types that this version knows. Raises `InvalidRequest` on a line that is no event."""
    events: list[Event] = []
    for line in payload.split(b"\n"):
        try:
            if line:
                events.append(translate(_decoder, line))
        except InvalidRequest as error:
            if error.param != "type" or not error.message.startswith("Invalid value"):
                raise
    return events


def to_builtins(event: Event) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(event)
    return plain
