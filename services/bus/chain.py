"""One message on a job's reply subject: each carries the sequence of the one before it (DESIGN section 4, the chain).

The broker refuses a message whose predecessor is not the last one stored, so it keeps each event once, in order, with
one end, however many writers there are and however late one wakes. Streams of tokens are written by `replies`; here
are the single messages that others write: the gateway's `accepted`, and ends.
"""

import asyncio
from collections.abc import Mapping

from schemas.asked import Asked
from schemas.errors import BusUnavailable, KvrelayError, QueueFull
from schemas.events import Accepted, End, Error, Event, encode_events
from schemas.subjects import CLAIM_HEADER, EXPECTED_LAST_SUBJECT_SEQUENCE_HEADER, reply_subject
from services.bus.connection import Bus, NoResponder
from services.bus.history import last_message
from services.bus.jetstream import WRONG_LAST_SEQUENCE, Refused, publish_stored

RETRY_S = 0.05
MAX_RETRY_S = 1.0


async def append(
    bus: Bus,
    tenant: str,
    job: str,
    events: list[Event],
    last: int,
    claim: str = "",
    trace: Mapping[str, str] | None = None,
) -> int | None:
    """Writes one message behind the one with sequence `last` (0: as the first). Returns its sequence.

    None if that is not the last one any more. Raises `QueueFull`, `TooLarge`, or `BusUnavailable` (then it may have
    been stored all the same: writing it again tells).
    """
    headers = {EXPECTED_LAST_SUBJECT_SEQUENCE_HEADER: str(last), **(trace or {})}
    if claim:
        headers[CLAIM_HEADER] = claim
    try:
        return (await publish_stored(bus, reply_subject(tenant, job), encode_events(events), headers)).seq
    except NoResponder as error:
        raise BusUnavailable("the replies stream does not exist yet") from error
    except Refused as error:
        if error.err_code == WRONG_LAST_SEQUENCE:
            return None
        raise


async def open_job(
    bus: Bus,
    tenant: str,
    job: str,
    model: str | None = None,
    trace: Mapping[str, str] | None = None,
    asked: Asked | None = None,
) -> int | None:
    """Writes the gateway's `accepted` as the first event. None if the job has events already: the id was used."""
    return await append(bus, tenant, job, [Accepted(job=job, model=model, asked=asked)], last=0, trace=trace)


async def end_job(
    bus: Bus,
    tenant: str,
    job: str,
    end: End,
    claim: str = "",
    trace: Mapping[str, str] | None = None,
    timeout_s: float = 10.0,
) -> bool:
    """Ends a job from outside its stream of tokens, behind whatever was written last.

    True if this end was written, False if the job had one. Raises `BusUnavailable` when `timeout_s` is over.
    """
    delay_s = RETRY_S
    unsure = False
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    stored = await last_message(bus, tenant, job)
                    if stored is not None and stored.ended:
                        return unsure and stored.payload == encode_events([end])
                    last = stored.sequence if stored else 0
                    if await append(bus, tenant, job, [end], last, claim, trace) is not None:
                        return True
                except (BusUnavailable, QueueFull):  # a full stream has room again when old replies expire
                    unsure = True  # our end may have been stored: the next look finds it
                    await asyncio.sleep(delay_s)
                    delay_s = min(2 * delay_s, MAX_RETRY_S)
    except TimeoutError as error:
        raise BusUnavailable(f"job {job} could not be ended in {timeout_s} s") from error


async def fail_job(bus: Bus, tenant: str, job: str, error: KvrelayError, claim: str = "") -> bool:
    """`end_job` with the error event that describes `error`."""
    return await end_job(bus, tenant, job, Error.of(error), claim)
