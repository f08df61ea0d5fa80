"""What a prefill worker tells the decode worker that goes on with a job. Only workers may publish it."""

from typing import Any

import msgspec

from schemas.errors import InvalidRequest, Undecodable, UnsupportedVersion
from schemas.events import Logprobs, Start
from schemas.job import OnDisconnect, Sampling
from schemas.wire import WIRE_VERSION, decode_versioned


class FirstToken(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    choice: int
    id: int
    logprobs: Logprobs | None = None


class Handoff(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job between two workers: on the decode subject to go on, on the rework subject to rebuild its blocks.

    `sampling` is resolved: `seed` and `max_tokens` are set. `last` is the stream sequence of the last message on
    the reply subject. `timeout_left_s` counts from the broker's timestamp of this message, as does `ttft_left_s`, which
    is None once there is a first token, or if the job sets no limit for it. `stored_blocks` is the
    number of leading prompt blocks (the partial last one included) that prefill knows to be in the store. `timings`
    are seconds that earlier stages took, for `done`. `conversation`: the job came as `messages`, so that a later prompt
    may begin with its answer. `hop` counts the hand-offs of this job; `reworked` says that it went back to prefill once
    already.
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
    ttft_left_s: float | None = None
    prompt_token_ids: list[int]
    sampling: Sampling
    first: list[FirstToken]
    stored_blocks: int
    cached_tokens: int
    reworked: bool = False
    salt: str = ""
    conversation: bool = False
    on_disconnect: OnDisconnect = "continue"
    owner: str | None = None
    timings: dict[str, float] = {}

    def __post_init__(self) -> None:
        if self.sampling.seed is None or self.sampling.max_tokens is None:
            raise InvalidRequest("a hand-off has a seed and max_tokens", param="sampling")
        if not self.prompt_token_ids:
            raise InvalidRequest("a hand-off has a prompt", param="prompt_token_ids")
        if any(not 0 <= first.choice < self.sampling.n for first in self.first):
            raise InvalidRequest(f"a first token belongs to no choice of n={self.sampling.n}", param="first")


_decoder = msgspec.json.Decoder(Handoff)


def parse_handoff(data: bytes) -> Handoff:
    """Raises `UnsupportedVersion` or `Undecodable`: no client can mend a hand-off."""
    try:
        return decode_versioned(_decoder, data)
    except UnsupportedVersion:
        raise
    except InvalidRequest as error:
        raise Undecodable(error.message, param=error.param) from error


def handed_on(handoff: Handoff, **changes: Any) -> Handoff:
    """The same job one hop further."""
    return msgspec.structs.replace(handoff, hop=handoff.hop + 1, **changes)


def start_event(handoff: Handoff, cached_tokens: int) -> Start:
    """The `start` of a job whose hand-off is resolved."""
    assert handoff.sampling.seed is not None
    return Start(
        job=handoff.job,
        origin=handoff.origin,
        digest=handoff.digest,
        build=handoff.build,
        seed=handoff.sampling.seed,
        prompt_tokens=len(handoff.prompt_token_ids),
        cached_tokens=cached_tokens,
    )
