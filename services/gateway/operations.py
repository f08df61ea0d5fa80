"""Every route as its document tells it. A route that is missing here fails `tests/gateway/test_openapi.py`."""

from typing import Annotated, Any, Literal

from msgspec import Meta

from schemas.batch import MAX_LIFE_S, MIN_LIFE_S, Batch, FileObject, NewBatch
from schemas.errors import (
    BuildGone,
    BusUnavailable,
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    IdConflict,
    Internal,
    JobNotFound,
    KvUnavailable,
    ModelNotFound,
    NoWorker,
    Poisoned,
    QueueFull,
    StorageFull,
    TooLarge,
    UpstreamTimeout,
    UpstreamUnavailable,
)
from schemas.generate import GenerateAnswer, GenerateError, GenerateEvent, GenerateRequest
from schemas.job_report import JobReport, RequestReport
from schemas.openai import ChatRequest, CompletionRequest, ErrorBody
from schemas.openai_answers import ChatAnswer, ChatChunk, CompletionAnswer, Model, ModelList
from schemas.stats import Stats
from services.gateway.course import SERVE_HEADER
from services.gateway.files import ANCHOR, PURPOSES, SECONDS, Deleted
from services.gateway.operation import EVENTS, JSON, Answer, Errors, Operation, Parameter, json
from services.gateway.paging import DEFAULT_LIMIT, MAX_LIMIT, Page
from services.gateway.readiness import Health, Report
from services.gateway.refusal import AcceptedRequest
from services.gateway.requests import LAST_EVENT_ID_HEADER, MAX_WAIT_S
from services.gateway.wishes import IDEMPOTENCY_KEY_HEADER

ENDS: Errors = (Cancelled, Poisoned, KvUnavailable, BuildGone, DeadlineExceeded)
"""What a job may end with, once it has begun."""
GENERATING: Errors = (
    *(ContextLengthExceeded, ModelNotFound, IdConflict, TooLarge, QueueFull, BusUnavailable, NoWorker),
    *ENDS,
)
FORWARDED: Errors = (UpstreamUnavailable, UpstreamTimeout)
STORED: Errors = (JobNotFound, BusUnavailable)

_KEY = Parameter(
    IDEMPOTENCY_KEY_HEADER,
    "header",
    Annotated[str, Meta(pattern=r"^[\x21-\x7e]{1,255}$")],
    "The same with each try of one request: it runs once. 409 for another request under the key.",
)
_PREFER = Parameter("Prefer", "header", Literal["respond-async"], "Answer 202 at once; the client comes back.")
_SERVE = Parameter(
    SERVE_HEADER, "header", Literal["here", "upstream"], "Which side shall answer, where the gateway has an upstream."
)
_EVENT_ID = Parameter(
    LAST_EVENT_ID_HEADER, "header", str, "The last `id:` that the reader has got; the stream goes on behind it."
)
_EVENT_ID_QUERY = Parameter("last_event_id", "query", str, "The same, for who cannot set headers.")
_WAIT = Parameter(
    "wait_s", "query", Annotated[float, Meta(ge=0.0, le=MAX_WAIT_S)], "How long to wait for the end, in seconds."
)
_ID = Parameter("id", "path", Annotated[str, Meta(min_length=1)], "Its id.")
_REQUEST = Parameter(
    "id",
    "path",
    Annotated[str, Meta(min_length=1)],
    "Of an answer (`chatcmpl-...`), of a job, or the client's own `X-Request-Id`.",
)
_MODEL = Parameter("model", "path", Annotated[str, Meta(min_length=1)], "One of its names; it may have slashes.")
_PAGE = (
    Parameter(
        "limit", "query", Annotated[int, Meta(ge=1, le=MAX_LIMIT)], f"At most so many; {DEFAULT_LIMIT} if left out."
    ),
    Parameter("after", "query", str, "The id of the last one of the page before."),
    Parameter("order", "query", Literal["asc", "desc"], "By age; `desc`, newest first, if left out."),
)
_UPLOAD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "purpose": {"enum": list(PURPOSES)},
        ANCHOR: {"enum": ["created_at"]},
        SECONDS: {"type": "integer", "minimum": MIN_LIFE_S, "maximum": MAX_LIFE_S},
    },
    "required": ["file", "purpose"],
}
_ANY_ANSWER = ChatAnswer | CompletionAnswer | GenerateAnswer
_LATER = json(202, "It runs without its client: `Location` tells where it is.", AcceptedRequest)


def _generating(path: str, doc: str, body: Any, whole: Any, chunk: Any) -> Operation:
    streamed = "The whole answer, or with `stream: true` its chunks, then `[DONE]`; a later error is the last event."
    refused = json(422, "The upstream does not like the request.", ErrorBody)
    answers = (Answer(200, streamed, {JSON: whole, EVENTS: chunk}), _LATER, refused)
    return Operation("post", path, doc, answers, (*GENERATING, *FORWARDED), (_KEY, _PREFER, _SERVE), body)


def _tgi(path: str, doc: str, answer: Answer) -> Operation:
    """Errors of ours have the shape of text-generation-inference, and what is wrong with a request is 422."""
    ours: Errors = (*GENERATING, Internal)
    statuses = {error.http_status for error in ours} - {400} | {422}
    errors = [json(status, "An error.", GenerateError) for status in sorted(statuses)]
    return Operation("post", path, doc, (answer, *errors, _LATER), (), (_KEY, _PREFER), GenerateRequest)


OPERATIONS: list[Operation] = [
    _generating("/v1/chat/completions", "The answer to a conversation.", ChatRequest, ChatAnswer, ChatChunk),
    _generating("/v1/completions", "What follows a text.", CompletionRequest, CompletionAnswer, CompletionAnswer),
    _tgi(
        "/generate",
        "What follows a text, as text-generation-inference answers.",
        json(200, "The answer.", GenerateAnswer),
    ),
    _tgi(
        "/generate_stream",
        "The same as a stream.",
        Answer(200, "An event for each token, and one for the end.", {EVENTS: GenerateEvent}),
    ),
    Operation("get", "/v1/models", "The models that have live workers.", (json(200, "All of them.", ModelList),)),
    Operation(
        "get",
        "/v1/models/{model}",
        "One model, whether or not workers live.",
        (json(200, "The model.", Model),),
        (ModelNotFound,),
        (_MODEL,),
    ),
    Operation(
        "get",
        "/v1/requests/{id}",
        "What became of a request.",
        (json(200, "Its job's state, or that of all its jobs.", JobReport | RequestReport),),
        STORED,
        (_REQUEST,),
    ),
    Operation(
        "delete",
        "/v1/requests/{id}",
        "Ends a request; one that has ended stays as it is.",
        (json(200, "How it is now.", JobReport | RequestReport),),
        STORED,
        (_REQUEST,),
    ),
    Operation(
        "get",
        "/v1/requests/{id}/answer",
        "The whole answer of a request.",
        (
            json(200, "In the shape of the route that it was asked for at.", _ANY_ANSWER),
            json(202, "It is not complete yet.", AcceptedRequest),
        ),
        (*STORED, NoWorker, *ENDS),
        (_REQUEST, _WAIT),
    ),
    Operation(
        "get",
        "/v1/requests/{id}/events",
        "The answer as a stream, from where its reader was: for EventSource, too.",
        (
            Answer(200, "The rest of the stream.", {EVENTS: ChatChunk | CompletionAnswer | GenerateEvent}),
            Answer(204, "The reader has got all of it."),
        ),
        (*STORED, NoWorker, *ENDS),
        (_REQUEST, _EVENT_ID, _EVENT_ID_QUERY),
    ),
    Operation(
        "post",
        "/v1/files",
        "Uploads the requests of a batch, one a line.",
        (json(200, "The file.", FileObject),),
        (TooLarge, StorageFull, BusUnavailable),
        form=_UPLOAD,
    ),
    Operation(
        "get",
        "/v1/files",
        "Files, uploaded ones and those of batches.",
        (json(200, "A page of them.", Page[FileObject]),),
        (BusUnavailable,),
        (*_PAGE, Parameter("purpose", "query", str, "Only those for this purpose.")),
    ),
    Operation("get", "/v1/files/{id}", "A file.", (json(200, "The file.", FileObject),), STORED, (_ID,)),
    Operation("delete", "/v1/files/{id}", "Forgets a file.", (json(200, "It is gone.", Deleted),), STORED, (_ID,)),
    Operation(
        "get",
        "/v1/files/{id}/content",
        "What is in a file.",
        (Answer(200, "Its bytes.", {"application/octet-stream": None}),),
        STORED,
        (_ID,),
    ),
    Operation(
        "post",
        "/v1/batches",
        "Runs the requests of a file on idle capacity.",
        (json(200, "The batch.", Batch),),
        (*STORED, TooLarge),
        body=NewBatch,
    ),
    Operation("get", "/v1/batches", "Batches.", (json(200, "A page of them.", Page[Batch]),), (BusUnavailable,), _PAGE),
    Operation("get", "/v1/batches/{id}", "A batch.", (json(200, "The batch.", Batch),), STORED, (_ID,)),
    Operation(
        "post",
        "/v1/batches/{id}/cancel",
        "Ends a batch; what is done is kept.",
        (json(200, "How it is now.", Batch),),
        STORED,
        (_ID,),
    ),
    Operation(
        "get",
        "/",
        "A page that shows the pipeline and talks to it.",
        (Answer(200, "The page.", {"text/html": None}), Answer(304, "It is the one that the reader has.")),
        parameters=(Parameter("If-None-Match", "header", str, "The page's ETag."),),
    ),
    Operation(
        "get",
        "/v1/stats",
        "The pipeline at a glance: queues, workers, rates and latencies.",
        (json(200, "What is known, and how old it is.", Stats),),
    ),
    Operation("get", "/openapi.json", "This document.", (json(200, "OpenAPI 3.2.", dict[str, Any]),)),
    Operation("get", "/health", "Whether the process lives.", (json(200, "It does.", Health),)),
    Operation(
        "get",
        "/ready",
        "Whether a request could be answered now.",
        (json(200, "It could.", Report), json(503, "It could not; the reasons say why.", Report)),
    ),
]
