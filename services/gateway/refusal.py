"""Errors as HTTP answers: OpenAI's body, the error's own status, and when to try again."""

import msgspec
from aiohttp import web

from schemas.errors import KvrelayError
from schemas.openai import error_body

RETRY_AFTER_S = 1


def refusal(error: KvrelayError, *, status: int | None = None, code: str | None = None) -> web.Response:
    """`status` and `code` override the error's own, for what only HTTP knows (404 of a route, 405)."""
    headers = {"Retry-After": str(RETRY_AFTER_S)} if error.retryable else {}
    body = msgspec.json.encode(error_body(error, code=code))
    return web.Response(body=body, status=status or error.http_status, content_type="application/json", headers=headers)
