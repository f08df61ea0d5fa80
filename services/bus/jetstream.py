"""JetStream's request API: calls, confirmed publishes, and what its refusals mean."""

from typing import Any

import msgspec

from schemas.errors import BusUnavailable, Internal, KvrelayError, QueueFull, TooLarge
from services.bus.clock import elapsed_s, parse_timestamp
from services.bus.connection import Bus
from services.bus.message import Headers

API = "$JS.API."

# Error codes of nats-server (server/errors.json).
STREAM_NOT_FOUND = 10059
STREAM_EXISTS = 10058
NO_MESSAGE = 10037
STORE_NOT_MADE = 10049  # "error creating store for stream"
WRONG_LAST_SEQUENCE = 10071
STORE_FAILED = 10077  # "maximum messages exceeded", "maximum bytes exceeded"
MESSAGE_TOO_LARGE = 10054
_BUSY = {10008, 10023, 10009, 10118, 10005, 10076}  # no leader, no quorum, out of resources, not enabled


class ApiError(msgspec.Struct, frozen=True):
    code: int
    err_code: int = 0
    description: str = ""


class PubAck(msgspec.Struct, frozen=True):
    """What a stream answers to a publish: the sequence it got, or why it was not stored."""

    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    error: ApiError | None = None


class Refused(Internal):
    """JetStream said no, for a reason that its caller must judge by `err_code`."""

    def __init__(self, error: ApiError, what: str) -> None:
        super().__init__(f"{what}: {error.description} ({error.err_code})")
        self.err_code = error.err_code


pub_ack_decoder = msgspec.json.Decoder(PubAck)


def refusal(error: ApiError, what: str) -> KvrelayError:
    """The error of our tree for a refusal of JetStream."""
    if error.err_code == STORE_FAILED:
        return QueueFull(f"{what} is full ({error.description}): try again later")
    if error.err_code == MESSAGE_TOO_LARGE:
        return TooLarge(f"{what}: {error.description}")
    if error.err_code in _BUSY:
        return BusUnavailable(f"{what}: {error.description}")
    return Refused(error, what)


async def call(bus: Bus, verb: str, body: Any = None, timeout_s: float = 5.0) -> dict[str, Any]:
    """`$JS.API.<verb>`. Raises `Refused`, or `BusUnavailable` when nobody answers.

    An answer with a `ts` sets the bus's clock by it.
    """
    asked_s = elapsed_s()
    payload = b"" if body is None else msgspec.json.encode(body)
    message = await bus.request(API + verb, payload, timeout_s=timeout_s)
    answered_s = elapsed_s()
    answer: dict[str, Any] = msgspec.json.decode(message.data)
    if "error" in answer:
        raise refusal(msgspec.convert(answer["error"], ApiError), verb)
    if "ts" in answer:
        bus.clock.set(parse_timestamp(answer["ts"]), asked_s, answered_s)
    return answer


async def publish_stored(
    bus: Bus, subject: str, payload: bytes, headers: Headers | None = None, timeout_s: float = 5.0
) -> PubAck:
    """Publishes and waits until a stream has stored it.

    Raises `NoResponder` (no stream takes the subject), `QueueFull`, `TooLarge`, `Refused`, or `BusUnavailable`
    (then it may have been stored all the same: only a message with an id may be sent again).
    """
    message = await bus.request(subject, payload, headers, timeout_s)
    ack = pub_ack_decoder.decode(message.data)
    if ack.error is not None:
        raise refusal(ack.error, ack.stream or subject)
    return ack
