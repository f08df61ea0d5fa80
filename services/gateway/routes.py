"""The routes, and the small ones' handlers."""

import time
from typing import Any

import msgspec
from aiohttp import HttpVersion11, web
from aiohttp.typedefs import Middleware

from schemas.openai_answers import ModelList
from schemas.wire import encode
from services.gateway.batches import Batches
from services.gateway.catalog import Catalog
from services.gateway.envelope import envelope
from services.gateway.files import Files
from services.gateway.generation import Generation
from services.gateway.listing import Listing
from services.gateway.openapi import document
from services.gateway.readiness import Health, Readiness
from services.gateway.requests import Requests
from services.gateway.start_page import StartPage
from services.gateway.stats import StatsRoute


class Routes:
    def __init__(
        self, process: str, catalog: Catalog, listing: Listing, readiness: Readiness, generation: Generation
    ) -> None:
        self._process = process
        self._catalog = catalog
        self._listing = listing
        self._readiness = readiness
        self._generation = generation
        self._started_s = time.monotonic()
        self._document = b""

    def application(
        self, requests: Requests, files: Files, batches: Batches, stats: StatsRoute, identify: Middleware
    ) -> web.Application:
        app = web.Application(middlewares=[envelope, identify])
        app.add_routes(
            _patient(
                web.post("/v1/chat/completions", self._generation.chat),
                web.post("/v1/completions", self._generation.completions),
                web.post("/generate", self._generation.generate),
                web.post("/generate_stream", self._generation.generate_stream),
                web.get("/v1/models", self.models),
                web.get("/v1/models/{model:.+}", self.model),
                web.get("/v1/requests/{id}", requests.show),
                web.get("/v1/requests/{id}/answer", requests.answer),
                web.get("/v1/requests/{id}/events", requests.events, allow_head=False),
                web.delete("/v1/requests/{id}", requests.cancel),
                web.post("/v1/files", files.create),
                web.get("/v1/files", files.index),
                web.get("/v1/files/{id}", files.show),
                web.delete("/v1/files/{id}", files.remove),
                web.get("/v1/files/{id}/content", files.content),
                web.post("/v1/batches", batches.create),
                web.get("/v1/batches", batches.index),
                web.get("/v1/batches/{id}", batches.show),
                web.post("/v1/batches/{id}/cancel", batches.cancel),
                web.get("/openapi.json", self.document),
                web.get("/v1/stats", stats.show),
                web.get("/", StartPage().show),
                web.get("/health", self.health),
                web.get("/ready", self.ready),
            )
        )
        return app

    async def models(self, request: web.Request) -> web.Response:
        return _json(ModelList(self._listing.all()))

    async def model(self, request: web.Request) -> web.Response:
        return _json(self._listing.one(request.match_info["model"]))

    async def health(self, request: web.Request) -> web.Response:
        """200 while the process lives, whatever the rest of the pipeline does."""
        report = self._readiness.report()
        health: Health = {
            "status": "ok",
            "process": self._process,
            "uptime_s": round(time.monotonic() - self._started_s, 3),
            "models": list(self._catalog.models),
            "open_requests": self._generation.num_open,
            "state": report.state,
            "reasons": report.reasons,
            "workers": report.workers,
        }
        return _json(health)

    async def document(self, request: web.Request) -> web.Response:
        """This API in OpenAPI's words; made once, when somebody first asks."""
        self._document = self._document or encode(document())
        return web.Response(body=self._document, content_type="application/json")

    async def ready(self, request: web.Request) -> web.Response:
        report = self._readiness.report()
        return _json(report, 200 if report.is_ready else 503)


def _patient(*routes: web.RouteDef) -> list[web.RouteDef]:
    """aiohttp refuses what it does not know to be expected, in plain text. RFC 9110 (10.1.1) allows to let it be."""
    for route in routes:
        route.kwargs["expect_handler"] = _go_on
    return list(routes)


async def _go_on(request: web.Request) -> None:
    if request.version >= HttpVersion11 and request.headers["Expect"].lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # of the answer nothing has been sent


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")
