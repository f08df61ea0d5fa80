"""`/v1/files`: OpenAI's, for batches. What is uploaded goes to the broker as it comes."""

import asyncio
from collections.abc import AsyncIterator
from typing import Literal, TypedDict, cast

import msgspec
from aiohttp import BodyPartReader, MultipartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from schemas.batch import MAX_LIFE_S, MIN_LIFE_S, FileObject
from schemas.errors import InvalidRequest, KvrelayError, TooLarge
from services.batch.shelf import Shelf
from services.bus.connection import Bus
from services.gateway.connection import ClientConnection
from services.gateway.envelope import TENANT, common_headers
from services.gateway.paging import page
from services.settings import Api

PURPOSES = ("batch",)
PURPOSE, ANCHOR, SECONDS = FIELDS = "purpose", "expires_after[anchor]", "expires_after[seconds]"
MAX_FIELD_BYTES = 1024
PART_BYTES = 65_536


class Deleted(TypedDict):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class Files:
    def __init__(self, bus: Bus, api: Api) -> None:
        self._bus = bus
        self._api = api

    def _shelf(self, request: web.Request) -> Shelf:
        return Shelf(self._bus, request[TENANT])

    async def create(self, request: web.Request) -> web.Response:
        """Raises `InvalidRequest`, `TooLarge`, `StorageFull` or `BusUnavailable`."""
        if request.content_type != "multipart/form-data":
            raise InvalidRequest("Content-Type must be multipart/form-data")
        try:
            return _json(await self._stored(self._shelf(request), await request.multipart()))
        except (ValueError, web.RequestPayloadError, HttpProcessingError) as error:
            raise InvalidRequest("the body is no multipart/form-data") from error

    async def _stored(self, shelf: Shelf, reader: MultipartReader) -> FileObject:
        """The fields may come in any order. What is not named in the end is not there."""
        fields: dict[str, str] = {}
        upload, filename = None, ""
        try:
            while (part := await reader.next()) is not None:
                if not isinstance(part, BodyPartReader):
                    raise InvalidRequest("a part of the body is a multipart of its own")
                if part.name != "file":
                    value = await _field(part)
                    if part.name in FIELDS:
                        fields[part.name] = value
                elif upload is None:
                    upload, filename = await shelf.upload(_parts(part)), part.filename or ""
                else:
                    raise InvalidRequest("file is given twice", param="file")
            if upload is None:
                raise InvalidRequest("file is missing", param="file")
            if fields.get(PURPOSE) not in PURPOSES:
                raise InvalidRequest(f"purpose must be one of {', '.join(PURPOSES)}", param=PURPOSE)
            return await shelf.name_file(upload, filename, fields[PURPOSE], _life_s(fields))
        except BaseException:
            if upload is not None:
                await asyncio.shield(shelf.forget(upload.name))
            raise

    async def index(self, request: web.Request) -> web.Response:
        purpose = request.query.get("purpose")
        found = [file for file in await self._shelf(request).files() if purpose in (None, file.purpose)]
        return _json(page(found, request.query, lambda file: file.id))

    async def show(self, request: web.Request) -> web.Response:
        return _json(await self._shelf(request).file(request.match_info["id"]))

    async def remove(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        await self._shelf(request).remove_file(name)
        gone: Deleted = {"id": name, "object": "file", "deleted": True}
        return _json(gone)

    async def content(self, request: web.Request) -> web.StreamResponse:
        """Raises `JobNotFound` or `BusUnavailable` before the first byte; later the connection is cut."""
        shelf = self._shelf(request)
        file = await shelf.file(request.match_info["id"])
        response = web.StreamResponse(headers={**common_headers(request), "Content-Type": "application/octet-stream"})
        response.content_length = file.bytes
        connection = cast(ClientConnection, request.protocol)
        with connection.attended(lambda _: None, self._api.stream_buffer_bytes, self._api.write_timeout_s):
            await response.prepare(request)
            try:
                async for part in shelf.content(file.id):
                    await response.write(part)
            except KvrelayError as error:
                raise ConnectionError(error.message) from error
            await response.write_eof()
        return response


async def _parts(part: BodyPartReader) -> AsyncIterator[bytes]:
    while data := await part.read_chunk(PART_BYTES):
        yield data


async def _field(part: BodyPartReader) -> str:
    """Raises `TooLarge` for more than is worth reading."""
    value = b""
    async for data in _parts(part):
        value += data
        if len(value) > MAX_FIELD_BYTES:
            raise TooLarge(f"the field {(part.name or '')[:64]!r} is too long")
    return value.decode("utf-8", "replace")


def _life_s(fields: dict[str, str]) -> int:
    """Raises `InvalidRequest`."""
    if ANCHOR not in fields and SECONDS not in fields:
        return MAX_LIFE_S
    if fields.get(ANCHOR) != "created_at":
        raise InvalidRequest("expires_after.anchor must be created_at", param="expires_after.anchor")
    text = fields.get(SECONDS, "")
    if not (text.isascii() and text.isdigit() and MIN_LIFE_S <= int(text) <= MAX_LIFE_S):
        raise InvalidRequest(
            f"expires_after.seconds must be from {MIN_LIFE_S} to {MAX_LIFE_S}", param="expires_after.seconds"
        )
    return int(text)


def _json(body: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
