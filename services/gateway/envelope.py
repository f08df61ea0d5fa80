"""Around every request: its id in and out, errors in OpenAI's shape, one log line without any text of the prompt."""

import logging
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from schemas.errors import InvalidRequest, KvrelayError, TooLarge
from services.gateway.inbox import ClientGone
from services.gateway.refusal import refusal
from services.openai.request_names import new_request_key

REQUEST_ID_HEADER = "X-Request-Id"
PROBES = frozenset({"/ready", "/health", "/v1/stats"})
CLIENT_GONE_STATUS = 499  # what logs say of a client that did not wait

_log = logging.getLogger("kvrelay.access")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

REQUEST_ID = web.RequestKey("request_id", str)  # the client's own, or ""
REQUEST_KEY = web.RequestKey("request_key", str)  # what its jobs and its answer are named after
TENANT = web.RequestKey("tenant", str)  # whose request it is
LOG_FIELDS = web.RequestKey("log_fields", dict[str, Any])  # what a handler adds to the request's log line
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def common_headers(request: web.Request) -> dict[str, str]:
    """Headers of every answer to `request`."""
    return {REQUEST_ID_HEADER: request[REQUEST_ID] or request[REQUEST_KEY]}


@web.middleware
async def envelope(request: web.Request, handler: Handler) -> web.StreamResponse:
    started_s = time.monotonic()
    given = request.headers.get(REQUEST_ID_HEADER, "")
    request[REQUEST_KEY] = new_request_key()
    request[REQUEST_ID] = given if _REQUEST_ID.fullmatch(given) else ""
    request[LOG_FIELDS] = {}
    status = 500
    try:
        response = await _answered(request, handler)
        status = response.status
        if not response.prepared:
            response.headers.update(common_headers(request))
        return response
    except (ClientGone, ConnectionError) as error:
        status = CLIENT_GONE_STATUS
        raise ConnectionResetError("the client went away") from error
    finally:
        _log_line(request, status, time.monotonic() - started_s)


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ClientGone:
        raise
    except KvrelayError as error:
        request[LOG_FIELDS]["code"] = error.code
        return refusal(error)
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        wrong = InvalidRequest(f"{request.method} is not allowed on {request.path[:200]}, use {allowed}")
        response = refusal(wrong, status=405, code="method_not_allowed")
        response.headers["Allow"] = allowed
        return response
    except web.HTTPRequestEntityTooLarge as error:  # a field of a form; where there is one, our own limit is lower
        return refusal(TooLarge(error.text or "a part of the body is too large"))
    except web.HTTPException as error:
        if error.status != 404:
            raise
        unknown = InvalidRequest(f"there is no {request.method} {request.path[:200]} here")
        return refusal(unknown, status=404, code="not_found")


def _log_line(request: web.Request, status: int, took_s: float) -> None:
    added: dict[str, Any] = request[LOG_FIELDS]
    fields = {
        "method": request.method,
        "path": request.path[:200],
        "status": status,
        "took_s": round(took_s, 6),
        "request": request[REQUEST_ID] or request[REQUEST_KEY],
        **added,
    }
    # Probes come several times a second and would drown what people ask for.
    level = logging.DEBUG if request.path in PROBES else logging.INFO
    _log.log(level, "request", extra={"fields": fields})
