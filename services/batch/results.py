"""The durable answers of a batch: one message a line of its input, which is never written twice."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import NamedTuple

import msgspec

from schemas.errors import BusUnavailable, KvrelayError, QueueFull
from schemas.openai import error_body
from schemas.subjects import (
    OUTCOME_HEADER,
    RESULTS_STREAM,
    result_subject,
    results_subject,
    retry_id,
)
from services.bus import records
from services.bus.connection import Bus

log = logging.getLogger("kvrelay.batch")

RETRY_S = 0.2
MAX_TRIES = 3  # of a line whose job failed for no fault of its own
COMPLETED, FAILED = "completed", "failed"


class Result(NamedTuple):
    """`data` is the line of the output or the error file, without its line end."""

    line: int
    outcome: str
    data: bytes


def answered(batch: str, line: int, custom_id: bytes, request_id: str, body: bytes) -> Result:
    return Result(line, COMPLETED, _spelled(batch, line, custom_id, _response(200, request_id, body), b"null"))


def refused(batch: str, line: int, custom_id: bytes, request_id: str, error: KvrelayError) -> Result:
    """What a client would have got as an HTTP error."""
    body = msgspec.json.encode(error_body(error))
    response = _response(error.http_status, request_id, body)
    return Result(line, FAILED, _spelled(batch, line, custom_id, response, b"null"))


def not_run(batch: str, line: int, custom_id: bytes, code: str, message: str) -> Result:
    error = msgspec.json.encode({"code": code, "message": message, "line": line})
    return Result(line, FAILED, _spelled(batch, line, custom_id, b"null", error))


def _response(status: int, request_id: str, body: bytes) -> bytes:
    return b'{"status_code":%d,"request_id":"%b","body":%b}' % (status, request_id.encode(), body)


def _spelled(batch: str, line: int, custom_id: bytes, response: bytes, error: bytes) -> bytes:
    """By hand: the custom_id must come out byte for byte."""
    head = b'{"id":"batch_req_%b_%d","custom_id":%b' % (batch.removeprefix("batch_").encode(), line, custom_id)
    return head + b',"response":%b,"error":%b}' % (response, error)


async def store(bus: Bus, tenant: str, batch: str, result: Result) -> bool:
    """Tries until it is there, also while there is no room. False if the line had a result. Raises `TooLarge`."""
    subject, headers = result_subject(tenant, batch, result.line), {OUTCOME_HEADER: result.outcome}
    unsure = told = False
    while True:
        try:
            return await records.put(bus, subject, result.data, 0, headers) is not None or unsure
        except QueueFull:
            if not told:
                log.warning("%s waits: there is no room for its results (bus.results_max_bytes)", batch)
            told = True
        except BusUnavailable:
            unsure = True
        await asyncio.sleep(RETRY_S)
        await bus.wait_connected()


async def stored(bus: Bus, tenant: str, batch: str) -> AsyncIterator[Result]:
    """All results so far, in the order in which they came. Raises `BusUnavailable`."""
    after, more = 0, True
    while more:
        found, more = await records.read_some(bus, RESULTS_STREAM, results_subject(tenant, batch), after)
        for record in found:
            after = record.sequence
            line = int(record.subject.rpartition(".")[2])
            yield Result(line, record.headers.get(OUTCOME_HEADER, COMPLETED), record.payload)


def job_of_line(batch: str, line: int, attempt: int = 0) -> str:
    """The id of a line's job."""
    return retry_id(f"{batch}-{line}", attempt) if attempt else f"{batch}-{line}"
