"""What a prefill worker tells the decode worker that goes on with a job. Only workers may publish it."""

import msgspec

from schemas.events import Logprobs
from schemas.job import OnDisconnect, Sampling
from schemas.wire import WIRE_VERSION, decode_versioned


class FirstToken(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    choice: int
    id: int
    logprobs: Logprobs | None = None


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds, by the broker's clock, that earlier stages took; carried along so that `done` can tell all."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    ttft_s: float = 0.0


class Handoff(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job between two workers: on the decode subject to go on, on the rework subject to rebuild its blocks.

    `sampling` is resolved: `seed` and `max_tokens` are set. `last` is the stream sequence of the last message on
    the reply subject. `timeout_left_s` counts from the broker's timestamp of this message. `stored_blocks` is the
    number of leading prompt blocks (the partial last one included) that prefill knows to be in the store.
    `hop` counts the hand-offs of this job; `reworked` says that it went back to prefill once already.
    """

    v: int = WIRE_VERSION
    tenant: str
    job: str
    origin: str
    digest: str
    build: str
    hop: int
    last: int
    timeout_left_s: float
    prompt_token_ids: list[int]
    sampling: Sampling
    first: list[FirstToken]
    stored_blocks: int
    cached_tokens: int
    reworked: bool = False
    salt: str = ""
    on_disconnect: OnDisconnect = "continue"
    owner: str | None = None
    timings: Timings = Timings()


_decoder = msgspec.json.Decoder(Handoff)


def parse_handoff(data: bytes) -> Handoff:
    """Raises `UnsupportedVersion` or `InvalidRequest`."""
    return decode_versioned(_decoder, data)
