"""OpenAI's files and batches as clients see them, and what is kept of them on the bus."""

from typing import Any, Literal

import msgspec

from schemas.asked import RouteName

MAX_LINES = 50_000
MAX_FILE_BYTES = 200 * 1024 * 1024
MIN_LIFE_S, MAX_LIFE_S = 3600, 30 * 86_400  # of a file; OpenAI's bounds
ENDPOINTS: dict[str, RouteName] = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}

BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
ENDED: frozenset[BatchStatus] = frozenset({"failed", "completed", "expired", "cancelled"})


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    """Times are unix seconds."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: str
    status: str = "processed"

    def has_expired(self, now: float) -> bool:
        return self.expires_at is not None and self.expires_at <= now


class RequestCounts(msgspec.Struct, frozen=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchError(msgspec.Struct, frozen=True, kw_only=True):
    """`line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct, frozen=True):
    data: list[BatchError]
    object: str = "list"


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's object. Times are unix seconds by the broker."""

    id: str
    object: str = "batch"
    endpoint: str
    model: str | None = None
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: dict[str, Any] | None = None


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is stored of a batch. `runner`: the process that works on it. Sizes of its files are known at its end."""

    batch: Batch
    runner: str = ""
    output_bytes: int = 0
    error_bytes: int = 0


class LineResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`body`: OpenAI's answer, or its error object."""

    status_code: int
    request_id: str
    body: dict[str, Any]


class LineError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a line was not run."""

    code: str
    message: str
    line: int


class LineResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a line: OpenAI's line of an output or error file, and the payload of a result on the bus."""

    id: str
    custom_id: str | None
    response: LineResponse | None
    error: LineError | None


class NewBatch(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, Any] | None = None


new_batch_decoder = msgspec.json.Decoder(NewBatch)
file_decoder = msgspec.json.Decoder(FileObject)
record_decoder = msgspec.json.Decoder(BatchRecord)
