"""Short answers: errors in OpenAI's body with their own status, and where to come back for an answer."""

from typing import Literal, TypedDict

import msgspec
from aiohttp import web

from schemas.errors import KvrelayError
from schemas.openai import error_body
from schemas.state import JobState

RETRY_AFTER_S = 1


class AcceptedRequest(TypedDict):
    """Body of a 202; `answer` and `events` are where to come back."""

    id: str
    object: Literal["request"]
    state: JobState
    answer: str
    events: str


def refusal(error: KvrelayError, *, status: int | None = None, code: str | None = None) -> web.Response:
    """`status` and `code` override the error's own, for what only HTTP knows (404 of a route, 405)."""
    headers = {"Retry-After": str(RETRY_AFTER_S)} if error.retryable else {}
    if (status or error.http_status) == 401:
        headers["WWW-Authenticate"] = "Bearer"  # RFC 9110, section 11.6.1
    body = msgspec.json.encode(error_body(error, code=code))
    return web.Response(body=body, status=status or error.http_status, content_type="application/json", headers=headers)


def accepted(answer_id: str, state: JobState = JobState.QUEUED) -> web.Response:
    """202: the request goes on without its client (RFC 7240, section 4.1)."""
    place = f"/v1/requests/{answer_id}"
    body: AcceptedRequest = {
        "id": answer_id,
        "object": "request",
        "state": state,
        "answer": f"{place}/answer",
        "events": f"{place}/events",
    }
    headers = {"Location": place, "Preference-Applied": "respond-async", "Retry-After": str(RETRY_AFTER_S)}
    return web.Response(body=msgspec.json.encode(body), status=202, content_type="application/json", headers=headers)
