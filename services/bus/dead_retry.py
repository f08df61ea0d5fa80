"""Publishes a dead letter as a job again, under a new id (DESIGN section 4, "same id again"), then removes it.

Whoever is killed in between has lost nothing: the next try finds the same id for the same job, and a job that is
queued twice runs once. See infra/decisions/0021-dead-letters.md.
"""

import base64
import enum
from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from schemas.errors import InvalidRequest, JobNotFound
from schemas.events import Error, Start
from schemas.handoff import Handoff, parse_handoff
from schemas.job import Job, Sampling, job_digest, parse_job
from schemas.subjects import (
    MSG_ID_HEADER,
    Lane,
    Stage,
    check_slug,
    parse_queue_subject,
    retry_ids,
    stream_name,
)
from schemas.wire import encode
from services.bus.connection import Bus
from services.bus.dead_letters import DeadLetter, payload_of, remove
from services.bus.history import read_all
from services.bus.jetstream import NO_MESSAGE, Refused, call
from services.bus.publish import job_msg_id, submit_job


@dataclass(frozen=True)
class Revived:
    """A job as it is published again, and where; `job.id` is the dead one's, if any."""

    tenant: str
    model: str
    lane: Lane
    job: Job


class _Place(enum.Enum):
    """What is known of an id that a job might get."""

    FREE = "free"
    OURS = "ours"  # an earlier try has published this very job there
    TAKEN = "taken"  # by another job, or by an earlier try that failed as well


def revive(letter: DeadLetter, payload: bytes) -> Revived:
    """A job as it was, a hand-off as the job that it came from, as far as it says. Nobody watches either any more.

    Raises `InvalidRequest` for what is no whole job or hand-off that this version understands.
    """
    if letter.is_truncated:
        raise InvalidRequest(
            f"only the first {letter.stored_bytes} of its {letter.payload_bytes} bytes were kept: "
            "publish the job again from where it came from, and drop this"
        )
    try:
        where = parse_queue_subject(letter.subject)
        if where.stage is Stage.PREFILL:
            tenant, job = where.tenant or "", parse_job(payload)
        else:
            handoff = parse_handoff(payload)
            tenant, job = handoff.tenant, _job_of(handoff)
        check_slug(tenant, "tenant")
    except InvalidRequest as error:
        raise type(error)(f"it is no job that can be published: {error.message}", param=error.param) from error
    return Revived(tenant, where.model, where.lane, msgspec.structs.replace(job, owner=None, on_disconnect="continue"))


async def retry(bus: Bus, letter: DeadLetter, given_out: Collection[str] = ()) -> str:
    """Publishes it, removes the letter, returns the new id. `given_out`: ids that other letters have just got.

    Raises `InvalidRequest` for what cannot be retried, `JobNotFound` for a letter that is gone, and what `submit_job`
    raises; then the letter is still there.
    """
    payload = await payload_of(bus, letter)
    if payload is None:
        raise JobNotFound(f"dead letter {letter.sequence} was removed meanwhile")
    revived = revive(letter, payload)
    for job_id in retry_ids(letter.job):
        if job_id not in given_out and await _published(bus, revived, job_id):
            await remove(bus, letter)
            return job_id
    raise AssertionError("retry_ids never ends")


async def _published(bus: Bus, revived: Revived, job_id: str) -> bool:
    """Whether the job is on its way, or done, under `job_id`, by this try or an earlier one."""
    job = msgspec.structs.replace(revived.job, id=job_id)
    place = await _place(bus, revived.tenant, job)
    if place is not _Place.FREE:
        return place is _Place.OURS
    payload = encode(job)
    headers = {MSG_ID_HEADER: job_msg_id(revived.tenant, job_id)}
    submitted = await submit_job(bus, revived.tenant, revived.model, revived.lane, payload, headers)
    if not submitted.duplicate:
        return True
    stream = stream_name(Stage.PREFILL, revived.model)
    try:
        queued = await call(bus, f"STREAM.MSG.GET.{stream}", {"seq": submitted.sequence})
    except Refused as error:
        if error.err_code != NO_MESSAGE:
            raise
        return await _place(bus, revived.tenant, job) is _Place.OURS  # settled since: its events tell
    return base64.b64decode(queued["message"]["data"]) == payload


async def _place(bus: Bus, tenant: str, job: Job) -> _Place:
    assert job.id is not None
    events = [event for message in await read_all(bus, tenant, job.id) for event in message.events]
    if not events:
        return _Place.FREE
    if isinstance(events[-1], Error):
        return _Place.TAKEN
    digests = {event.digest for event in events if isinstance(event, Start)}
    return _Place.OURS if digests == {job_digest(job)} else _Place.TAKEN


def _job_of(handoff: Handoff) -> Job:
    """The same prompt and the same sampling with its seed, hence the same tokens on the same build.

    How long it might take is not known any more; metadata neither.
    """
    sampling = {name: getattr(handoff.sampling, name) for name in Sampling.__struct_fields__}
    return Job(prompt_token_ids=handoff.prompt_token_ids, cache_salt=handoff.salt, **sampling)
