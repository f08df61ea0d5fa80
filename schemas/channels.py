"""Every subject that kvrelay uses, with what its messages are and who may send and read them."""

from dataclasses import dataclass
from typing import Any, Literal

from schemas.batch import BatchRecord, FileObject, LineResult
from schemas.beat import Beat
from schemas.drain import DrainReply
from schemas.events import Event
from schemas.handoff import Handoff
from schemas.job import Job
from schemas.micro import PREFIX, Info, Ping, Stats
from schemas.subjects import (
    BATCHES_STREAM,
    DEAD_STREAM,
    FILE_META,
    FILES_STREAM,
    JOB_ID,
    REPLIES_STREAM,
    RESULTS_STREAM,
    SLUG,
    Lane,
    Stage,
    batch_subject,
    beat_subject,
    cancel_subject,
    dead_subject,
    decode_subject,
    drain_subject,
    file_subject,
    prefill_subject,
    reply_subject,
    result_subject,
    rework_subject,
    stream_name,
    watched_subject,
)

Audience = Literal["tenants", "operators", "workers", "gateways"]

PARAMETERS: dict[str, tuple[str, str]] = {
    "tenant": (SLUG, "Whose job it is; `default` where nobody says otherwise."),
    "model": (SLUG, "The model's slug, like `smollm2-135m-instruct`."),
    "lane": ("|".join(Lane), "Interactive jobs go before those of batches."),
    "job": (JOB_ID, "A job's id, unique to its tenant."),
    "build": (r"[0-9a-f]{12}", "Weights, tokenizer and arithmetic: workers of one build compute the same tokens."),
    "process": (r"[^.\s]+", "A process's name, unique to one of its lives."),
    "batch": (JOB_ID, "A batch's id."),
    "line": (r"[1-9][0-9]*", "The number of a line of its input."),
    "file": (JOB_ID, "A file's id."),
    "part": (r"[0-9]+", "The number of a part."),
    "verb": ("PING|INFO|STATS", "What is asked."),
}
"""Pattern and meaning of what a subject names."""


@dataclass(frozen=True)
class Channel:
    """`address` has `{parameters}`. `kind`: the type of a message as JSON, None where it has no payload or bytes of
    somebody else's. `lines`: a message is one or more of them, a line each.
    """

    name: str
    address: str
    kind: Any
    doc: str
    sends: Audience
    reads: Audience
    stream: str = ""
    lines: bool = False
    reply: Any = None


CHANNELS: list[Channel] = [
    Channel(
        "jobs",
        prefill_subject("{tenant}", "{model}", "{lane}"),
        Job,
        "One job. A `nats request` is answered by the stream; no responder: no such model or lane.",
        "tenants",
        "workers",
        stream_name(Stage.PREFILL, "{model}"),
    ),
    Channel(
        "replies",
        reply_subject("{tenant}", "{job}"),
        Event,
        "A job's events in their order, one a line, each stored once; the last one is `done` or `error`.",
        "workers",
        "tenants",
        REPLIES_STREAM,
        lines=True,
    ),
    Channel("cancels", cancel_subject("{tenant}", "{job}"), None, "The job was ended.", "tenants", "workers"),
    Channel(
        "results",
        result_subject("{tenant}", "{batch}", "{line}"),
        LineResult,
        "The answer to a line of a batch, whole.",
        "gateways",
        "tenants",
        RESULTS_STREAM,
    ),
    Channel(
        "dead",
        dead_subject("{tenant}", "{job}"),
        None,
        "A queue message that was given up, as it was; headers say why.",
        "workers",
        "operators",
        DEAD_STREAM,
    ),
    Channel("beats", beat_subject("{process}"), Beat, "Once a second from every process.", "workers", "operators"),
    Channel(
        "drains",
        drain_subject("{process}"),
        None,
        "A request to leave.",
        "operators",
        "workers",
        reply=DrainReply,
    ),
    Channel(
        "rework",
        rework_subject("{model}", "{build}", "{lane}"),
        Handoff,
        "A job back to prefill, since its blocks were lost.",
        "workers",
        "workers",
        stream_name(Stage.REWORK, "{model}"),
    ),
    Channel(
        "decode",
        decode_subject("{model}", "{build}", "{lane}"),
        Handoff,
        "A job whose prompt is computed.",
        "workers",
        "workers",
        stream_name(Stage.DECODE, "{model}"),
    ),
    Channel(
        "watched",
        watched_subject("{tenant}", "{job}"),
        None,
        "Asks who waits for a job; a gateway whose client does answers with its name.",
        "workers",
        "gateways",
    ),
    Channel(
        "file_parts",
        file_subject("{tenant}", "{file}", "{part}"),
        None,
        "A part of an uploaded file.",
        "gateways",
        "gateways",
        FILES_STREAM,
    ),
    Channel(
        "files",
        file_subject("{tenant}", "{file}", FILE_META),
        FileObject,
        "An uploaded file that is whole.",
        "gateways",
        "gateways",
        FILES_STREAM,
    ),
    Channel(
        "batches",
        batch_subject("{tenant}", "{batch}"),
        BatchRecord,
        "A batch as it is now.",
        "gateways",
        "gateways",
        BATCHES_STREAM,
    ),
    Channel(
        "services",
        f"{PREFIX}.{{verb}}",
        None,
        "NATS's service protocol, for `nats micro`; also with the service and the process behind the verb.",
        "operators",
        "workers",
        reply=Ping | Info | Stats,
    ),
]
