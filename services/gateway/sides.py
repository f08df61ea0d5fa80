"""Two sides that can answer: this pipeline, and the upstream. Which of them does, and what the other one is asked."""

import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Any

from aiohttp import web

from schemas.json_object import read_object
from services.gateway.aliases import Alias
from services.gateway.catalog import Catalog
from services.gateway.course import HERE, UPSTREAM, Course, Courses
from services.gateway.envelope import REQUEST_ID, REQUEST_KEY
from services.gateway.forwarding import Forwarding
from services.gateway.inbox import Inbox
from services.gateway.mirror import Mirrored, Mirrors
from services.gateway.readiness import Readiness
from services.gateway.upstream import headers_of
from services.gateway.wishes import Wishes
from services.openai.observed import Observed
from services.settings import Settings
from services.text.model import TextModel

Observe = Callable[[dict[str, Any], str], Awaitable[Observed]]
"""A request's body and its model's name here -> our own answer to it."""


class Sides:
    """Raises `SetupError` for settings that lead nowhere. Works from `start` to `close`."""

    def __init__(self, settings: Settings, catalog: Catalog, readiness: Readiness) -> None:
        self._courses = Courses(settings.upstream, catalog, readiness)
        self._forwarding = Forwarding(settings.upstream, settings.api)
        self._mirrors = Mirrors()

    @property
    def are_two(self) -> bool:
        return self._courses.are_several

    @property
    def aliases(self) -> Mapping[str, Alias]:
        return self._courses.aliases

    def find_here(self, model: str) -> TextModel:
        """For what never goes upstream. Raises `ModelNotFound`."""
        return self._courses.find_here(model)

    def start(self) -> None:
        self._forwarding.start()

    async def close(self) -> None:
        await self._mirrors.close()
        await self._forwarding.close()

    def course(self, request: web.Request, body: bytes, wishes: Wishes) -> tuple[Course, dict[str, Any]]:
        """Who answers, and the body as JSON. Raises `InvalidRequest` or `ModelNotFound`."""
        fields = read_object(body)
        model = fields.get("model")
        if not isinstance(model, str):  # who reads the request says what is wrong with it
            return Course(False, ""), fields
        return self._courses.choose(request, model, wishes), fields

    async def forward(
        self, request: web.Request, inbox: Inbox, fields: dict[str, Any], course: Course, observe: Observe
    ) -> web.StreamResponse:
        """The upstream's answer. Raises `UpstreamUnavailable`, `UpstreamTimeout` or `ClientGone`."""
        mirrored = None
        if course.is_mirrored:
            ours = partial(observe, fields, course.other_model)
            mirrored = self._mirrors.start(_name(request), (UPSTREAM, HERE), ours)
        return await self._forwarding.answer(request, inbox, fields, course, mirrored)

    @contextlib.contextmanager
    def mirrored(self, request: web.Request, fields: dict[str, Any], course: Course) -> Iterator[Observed | None]:
        """Around an answer of ours: what it says is to be written into what this gives, if anything."""
        if not course.is_mirrored:
            yield None
            return
        mirrored: Mirrored = self._mirrors.start(
            _name(request),
            (HERE, UPSTREAM),
            partial(self._forwarding.observe, request.path, headers_of(request), fields, course.other_model),
        )
        try:
            yield mirrored.answered
            mirrored.end()
        finally:
            mirrored.end("cancelled")


def _name(request: web.Request) -> str:
    return str(request[REQUEST_ID] or request[REQUEST_KEY])
