"""Errors of /generate, in the shape that clients of text-generation-inference read."""

from collections.abc import Awaitable

import msgspec
from aiohttp import web

from schemas.errors import KvrelayError
from schemas.generate import TGI_TYPES, GenerateError
from schemas.openai import error_body
from services.gateway.envelope import LOG_FIELDS
from services.gateway.inbox import ClientGone
from services.gateway.refusal import RETRY_AFTER_S


async def in_tgi_shape(request: web.Request, answering: Awaitable[web.StreamResponse]) -> web.StreamResponse:
    """The answer, or the error before its first byte."""
    try:
        return await answering
    except ClientGone:
        raise
    except KvrelayError as error:
        request[LOG_FIELDS]["code"] = error.code
        status = 422 if error.http_status == 400 else error.http_status
        body = GenerateError(error_body(error)["error"]["message"], TGI_TYPES.get(status, "generation"))
        headers = {"Retry-After": str(RETRY_AFTER_S)} if error.retryable else {}
        return web.Response(
            body=msgspec.json.encode(body), status=status, content_type="application/json", headers=headers
        )
