"""`/v1/batches`: OpenAI's."""

import msgspec
from aiohttp import web

from schemas.batch import ENDPOINTS, BatchRecord, new_batch_decoder
from schemas.errors import InvalidRequest
from schemas.json_object import read_object
from schemas.wire import translate
from services.batch.ordering import cancel_batch, new_batch
from services.batch.shelf import Shelf
from services.bus.connection import Bus
from services.gateway.body import read_body
from services.gateway.envelope import TENANT
from services.gateway.paging import page

MAX_BODY_BYTES = 262_144


class Batches:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    def _shelf(self, request: web.Request) -> Shelf:
        return Shelf(self._bus, request[TENANT])

    async def create(self, request: web.Request) -> web.Response:
        """Raises `InvalidRequest`, `JobNotFound` or `BusUnavailable`."""
        body = await read_body(request, MAX_BODY_BYTES)
        read_object(body)
        asked = translate(new_batch_decoder, body)
        if asked.endpoint not in ENDPOINTS:
            raise InvalidRequest(f"endpoint must be one of {', '.join(ENDPOINTS)}", param="endpoint")
        shelf = self._shelf(request)
        await shelf.file(asked.input_file_id)
        batch = new_batch(asked.input_file_id, asked.endpoint, asked.completion_window, self._bus.now(), asked.metadata)
        await shelf.put_batch(BatchRecord(batch=batch))
        return _json(batch)

    async def index(self, request: web.Request) -> web.Response:
        batches = [record.batch for _, record in await self._shelf(request).batches()]
        return _json(page(batches, request.query, lambda batch: batch.id))

    async def show(self, request: web.Request) -> web.Response:
        _, record = await self._shelf(request).batch(request.match_info["id"])
        return _json(record.batch)

    async def cancel(self, request: web.Request) -> web.Response:
        """One that has ended stays as it is."""
        return _json(await cancel_batch(self._shelf(request), request.match_info["id"], self._bus.now()))


def _json(body: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
