"""Publishes to the work queues: each message is stored, or an error says why not."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from schemas.errors import BusUnavailable, KvrelayError, ModelNotFound, QueueFull
from schemas.handoff import Handoff
from schemas.subjects import (
    MSG_ID_HEADER,
    Lane,
    Stage,
    decode_subject,
    derived_job_id,
    handoff_msg_id,
    prefill_subject,
    rework_subject,
    stream_name,
)
from schemas.wire import encode
from services.bus.connection import Bus, NoResponder
from services.bus.facts import StreamFacts
from services.bus.jetstream import STREAM_NOT_FOUND, Refused, call, publish_stored
from services.bus.message import Headers

RETRY_S = 0.1
MAX_RETRY_S = 1.0


@dataclass(frozen=True)
class Submitted:
    """A job on its queue. `duplicate`: a message with this id was there already, and this is its sequence."""

    stream: str
    sequence: int
    duplicate: bool = False

    async def origin(self, bus: Bus) -> str:
        """The job's id if it was published without one. Asks for what tenants may not see (infra/nats/nats.conf)."""
        return derived_job_id(self.sequence, await bus.part(StreamFacts).created_ms(self.stream))


async def submit_job(
    bus: Bus, tenant: str, model: str, lane: Lane, payload: bytes, headers: Headers | None = None
) -> Submitted:
    """Puts a job on its model's queue; `headers` are the trace and, for a job with an id, `Nats-Msg-Id`.

    Raises `ModelNotFound`, `QueueFull`, `TooLarge`, or `BusUnavailable` (then it may have been queued all the same;
    a job with an id may be sent again).
    """
    try:
        ack = await publish_stored(bus, prefill_subject(tenant, model, lane), payload, headers)
    except NoResponder as error:
        raise await _no_queue(bus, model, lane) from error
    except QueueFull as error:
        raise QueueFull(f"the queue of model {model!r} is full: try again later") from error
    bus.part(StreamFacts)  # who publishes reads the broker's clock, which this keeps in step
    return Submitted(stream_name(Stage.PREFILL, model), ack.seq, ack.duplicate)


async def _no_queue(bus: Bus, model: str, lane: Lane) -> KvrelayError:
    """Why nobody took a job: there is no such queue, or its stream has no leader right now."""
    try:
        await call(bus, f"STREAM.INFO.{stream_name(Stage.PREFILL, model)}")
    except Refused as error:
        if error.err_code == STREAM_NOT_FOUND:
            return ModelNotFound(f"no queue for model {model!r} and lane {lane}", param="model")
        return error
    except BusUnavailable as error:
        return error
    return BusUnavailable(f"the queue of model {model!r} has no leader right now: try again")


def job_msg_id(tenant: str, job: str) -> str:
    """`Nats-Msg-Id` of a job that has an id: publishing it twice in a short time queues it once."""
    return f"{tenant}.{job}"


async def publish_handoff(
    bus: Bus,
    handoff: Handoff,
    model: str,
    lane: Lane,
    stage: Stage = Stage.DECODE,
    headers: Headers | None = None,
    held: Callable[[], bool] = lambda: False,
) -> int:
    """Hands a job to the decode or the rework queue of its build. Returns the message's sequence there.

    Its id makes sending it again harmless, so a full stream or a silent broker is tried again for as long as `held`
    says that the claim is ours. Raises `TooLarge`, `QueueFull` or `BusUnavailable`.
    """
    spell = decode_subject if stage is Stage.DECODE else rework_subject
    subject = spell(model, handoff.build, lane)
    headers = {**(headers or {}), MSG_ID_HEADER: handoff_msg_id(handoff.tenant, handoff.job, stage, handoff.hop)}
    payload = encode(handoff)
    delay_s = RETRY_S
    while True:
        try:
            return (await publish_stored(bus, subject, payload, headers)).seq
        except (QueueFull, BusUnavailable):
            if not held():
                raise
            await asyncio.sleep(delay_s)
            if not held():
                raise
        delay_s = min(2 * delay_s, MAX_RETRY_S)
