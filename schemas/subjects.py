"""Every subject, stream, consumer, header and id that kvrelay uses on NATS is spelled here and nowhere else."""

import enum
import hashlib
import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

from schemas.errors import InvalidRequest

DEFAULT_TENANT = "default"

CLAIM_HEADER = "Kvrelay-Claim"
WORKER_HEADER = "Kvrelay-Worker"
MSG_ID_HEADER = "Nats-Msg-Id"
EXPECTED_LAST_SUBJECT_SEQUENCE_HEADER = "Nats-Expected-Last-Subject-Sequence"

OUTCOME_HEADER = "Kvrelay-Outcome"  # of a result

# Of a dead letter: why it is one, and the message that it was.
CODE_HEADER = "Kvrelay-Code"
REASON_HEADER = "Kvrelay-Reason"
ORIGIN_HEADER = "Kvrelay-Origin"
SUBJECT_HEADER = "Kvrelay-Subject"
DELIVERIES_HEADER = "Kvrelay-Deliveries"
TRUNCATED_HEADER = "Kvrelay-Truncated"  # bytes of the whole payload

REPLIES_STREAM = "KVRELAY_REPLIES"
RESULTS_STREAM = "KVRELAY_RESULTS"
DEAD_STREAM = "KVRELAY_DEAD"
FILES_STREAM = "KVRELAY_FILES"
BATCHES_STREAM = "KVRELAY_BATCHES"
PREFILL_SUBJECTS = "kvrelay.prefill.*.*.*"
REPLIES_SUBJECTS = "kvrelay.replies.*.*"
RESULTS_SUBJECTS = "kvrelay.results.*.*.*"
DEAD_SUBJECTS = "kvrelay.dead.*.*"
FILES_SUBJECTS = "kvrelay.files.*.*.*"
BATCHES_SUBJECTS = "kvrelay.batches.*.*"
FILE_META = "meta"
ALL_CANCELS = "kvrelay.cancel.*.*"
ALL_WATCHED = "kvrelay.watched.*.*"
ALL_BEATS = "kvrelay.beat.*"

SLUG = r"[a-z0-9-]{1,64}"
JOB_ID = r"[A-Za-z0-9_-]{1,64}"

_SLUG = re.compile(SLUG)
_JOB_ID = re.compile(JOB_ID)


class Lane(enum.StrEnum):
    INTERACTIVE = "interactive"
    BATCH = "batch"


class Stage(enum.StrEnum):
    """The three work queues of a model."""

    PREFILL = "prefill"
    REWORK = "rework"
    DECODE = "decode"


def check_slug(value: str, what: str) -> str:
    """Returns `value` if it is an operator's slug. Raises `InvalidRequest` naming `what` otherwise."""
    if not _SLUG.fullmatch(value):
        raise InvalidRequest(f"{what} must match [a-z0-9-]{{1,64}}, got {value[:80]!r}", param=what)
    return value


def check_job_id(value: str) -> str:
    """Returns `value` if it is a job id. Raises `InvalidRequest` otherwise."""
    if not _JOB_ID.fullmatch(value):
        raise InvalidRequest(f"id must match [A-Za-z0-9_-]{{1,64}}, got {value[:80]!r}", param="id")
    return value


def model_slug(name: str) -> str:
    """`HuggingFaceTB/SmolLM2-135M-Instruct` -> `smollm2-135m-instruct`: the last path part, lower case, dashes."""
    tail = name.rstrip("/").rsplit("/", 1)[-1].lower()
    return re.sub(r"[^a-z0-9]+", "-", tail).strip("-")[:64] or "model"


def prefill_subject(tenant: str, model: str, lane: Lane | str) -> str:
    """A lane, here and below, or `*` for all of them."""
    return f"kvrelay.prefill.{tenant}.{model}.{lane}"


def rework_subject(model: str, build: str, lane: Lane | str) -> str:
    return f"kvrelay.rework.{model}.{build}.{lane}"


def decode_subject(model: str, build: str, lane: Lane | str) -> str:
    return f"kvrelay.decode.{model}.{build}.{lane}"


def reply_subject(tenant: str, job: str) -> str:
    return f"kvrelay.replies.{tenant}.{job}"


def dead_subject(tenant: str, job: str) -> str:
    return f"kvrelay.dead.{tenant}.{job}"


def result_subject(tenant: str, batch: str, line: int | str) -> str:
    return f"kvrelay.results.{tenant}.{batch}.{line}"


def results_subject(tenant: str, batch: str) -> str:
    """All results of a batch."""
    return result_subject(tenant, batch, "*")


def file_subject(tenant: str, file: str, part: int | str) -> str:
    """A part of a file by its number, `FILE_META`, or `*` for all of it; `file` may be `*` as well."""
    return f"kvrelay.files.{tenant}.{file}.{part}"


def batch_subject(tenant: str, batch: str) -> str:
    """The record of a batch; `*` for all of a tenant's."""
    return f"kvrelay.batches.{tenant}.{batch}"


def cancel_subject(tenant: str, job: str) -> str:
    return f"kvrelay.cancel.{tenant}.{job}"


def watched_subject(tenant: str, job: str) -> str:
    """Where it is asked who waits for a job; only gateways and workers may use it."""
    return f"kvrelay.watched.{tenant}.{job}"


def beat_subject(process: str) -> str:
    return f"kvrelay.beat.{process}"


def drain_subject(process: str) -> str:
    """Where a worker is asked to leave; only operators may publish there."""
    return f"kvrelay.drain.{process}"


def job_of_subject(subject: str) -> tuple[str, str]:
    """(tenant, job) of a reply, cancel, watched or dead subject, (tenant, batch) of a batch's."""
    _, _, tenant, job = subject.split(".")
    return tenant, job


def tenant_and_lane(prefill: str) -> tuple[str, Lane]:
    """(tenant, lane) of a prefill subject. Raises `InvalidRequest` if the tenant is not a slug."""
    _, _, tenant, _, lane = prefill.split(".")
    return check_slug(tenant, "tenant"), Lane(lane)


class QueueSubject(NamedTuple):
    """The subject of a job or a hand-off. A job has a tenant there, a hand-off a build."""

    stage: Stage
    model: str
    lane: Lane
    tenant: str | None = None
    build: str | None = None


def parse_queue_subject(subject: str) -> QueueSubject:
    """Raises `InvalidRequest` for any other subject."""
    match subject.split("."):
        case ["kvrelay", Stage.PREFILL, tenant, model, lane] if lane in list(Lane):
            return QueueSubject(Stage.PREFILL, model, Lane(lane), tenant=tenant)
        case ["kvrelay", Stage.REWORK | Stage.DECODE as stage, model, build, lane] if lane in list(Lane):
            return QueueSubject(Stage(stage), model, Lane(lane), build=build)
    raise InvalidRequest(f"{subject[:200]!r} is no subject of a work queue")


def stream_name(stage: Stage, model: str) -> str:
    return f"KVRELAY_{stage.upper()}_{model}"


def model_of_stream(name: str) -> str:
    """The inverse of `stream_name`."""
    return name.split("_", 2)[2]


def stream_subjects(stage: Stage, model: str) -> list[str]:
    """A stream lists its lanes, so that a publish to an unknown lane or model has no responder."""
    if stage is Stage.PREFILL:
        return [prefill_subject("*", model, lane) for lane in Lane]
    return [f"kvrelay.{stage}.{model}.*.{lane}" for lane in Lane]


def build_and_lane(subject: str) -> tuple[str, Lane]:
    """(build, lane) of a decode or rework subject."""
    _, _, _, build, lane = subject.split(".")
    return build, Lane(lane)


def consumer_name(stage: Stage, lane: Lane, build: str) -> str:
    """One consumer a lane; the stages after prefill have one a build and lane."""
    return str(lane) if stage is Stage.PREFILL else f"{build}-{lane}"


def consumer_filter(stage: Stage, model: str, lane: Lane, build: str) -> str:
    if stage is Stage.PREFILL:
        return prefill_subject("*", model, lane)
    return f"kvrelay.{stage}.{model}.{build}.{lane}"


def handoff_msg_id(tenant: str, job: str, stage: Stage, hop: int) -> str:
    return f"{tenant}.{job}.{stage}.{hop}"


def claim(stage: Stage, hop: int, delivery: int) -> str:
    """The value of `CLAIM_HEADER`: which delivery wrote an event."""
    return f"{stage}.{hop}.{delivery}"


class Claim(NamedTuple):
    """Which delivery wrote an event: the queue, the hop of its message, and the count of its deliveries."""

    stage: Stage
    hop: int
    delivery: int


def parse_claim(value: str) -> Claim | None:
    """The inverse of `claim`; None for what no worker wrote."""
    match value.split("."):
        case [stage, hop, delivery] if stage in list(Stage) and hop.isdecimal() and delivery.isdecimal():
            return Claim(Stage(stage), int(hop), int(delivery))
    return None


def derived_job_id(queue_sequence: int, stream_created_ms: int) -> str:
    """Id of a job that was published without one; the publisher can derive it from its ack and the stream's info."""
    return f"{queue_sequence}-{stream_created_ms}"


def parse_origin(origin: str) -> tuple[int, int] | None:
    """(queue sequence, creation of its stream in ms) of what `derived_job_id` made; None for anything else."""
    sequence, _, created_ms = origin.partition("-")
    return (int(sequence), int(created_ms)) if sequence.isdecimal() and created_ms.isdecimal() else None


def derived_seed(tenant: str, job: str) -> int:
    """Seed of a job that was published without one: 63 bits, the same for every delivery."""
    digest = hashlib.blake2b(f"{tenant}.{job}".encode(), digest_size=8, person=b"kvrelay-seed").digest()
    return int.from_bytes(digest, "little") >> 1


def retry_ids(job: str) -> Iterator[str]:
    """The ids under which a dead job may be published again, in order: `a-r1`, `a-r2` and so on for `a`."""
    retried = re.fullmatch(r"(.+)-r(\d{1,9})", job)
    base, before = (retried[1], int(retried[2])) if retried else (job, 0)
    return (retry_id(base, attempt) for attempt in itertools.count(before + 1))


def retry_id(job: str, attempt: int) -> str:
    """Id under which a dead or failed job is published again; still at most 64 characters."""
    suffix = f"-r{attempt}"
    return job[: 64 - len(suffix)] + suffix
