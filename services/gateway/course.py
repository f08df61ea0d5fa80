"""Who answers a request: this pipeline, or the upstream that its operator moves away from, or to."""

import hashlib
import random
from typing import Literal, NamedTuple

from aiohttp import web

from schemas.errors import InvalidRequest, ModelNotFound, SetupError
from services.gateway.aliases import parse_aliases
from services.gateway.catalog import Catalog
from services.gateway.readiness import Readiness
from services.gateway.wishes import Wishes
from services.settings import Upstream
from services.text.model import TextModel

SERVE_HEADER = "X-Kvrelay-Serve"  # asks for a side
SERVED_BY_HEADER = "X-Kvrelay-Served-By"  # says which it was, where there are two
HERE, UPSTREAM = "here", "upstream"

Why = Literal["", "header", "alias", "share", "fallback"]


class Course(NamedTuple):
    """`model`: its name on the side that answers. `why`: what sent it upstream. `is_mirrored`: the other side answers
    it, too, and nobody gets that; `other_model` is its name there."""

    is_upstream: bool
    model: str
    why: Why = ""
    is_mirrored: bool = False
    other_model: str = ""


class Courses:
    """Raises `SetupError` for aliases that lead nowhere."""

    def __init__(self, settings: Upstream, catalog: Catalog, readiness: Readiness) -> None:
        self._settings = settings
        self._catalog = catalog
        self._readiness = readiness
        self.aliases = parse_aliases(settings.aliases)
        self.are_several = bool(settings.url or self.aliases)  # otherwise all is answered here, under its own name
        for name, alias in self.aliases.items():
            for target in alias.targets:
                if target.is_upstream and not settings.url:
                    raise SetupError(f"upstream.aliases: {name} needs upstream.url", param="upstream.url")
                if not target.is_upstream and not catalog.has(target.model):
                    raise SetupError(
                        f"upstream.aliases: {name} leads to {target.model!r}, which is not served here",
                        param="upstream.aliases",
                    )

    def choose(self, request: web.Request, model: str, wishes: Wishes) -> Course:
        """Raises `InvalidRequest` or `ModelNotFound`."""
        side = self._side(request)
        course = self._course(model, side, wishes)
        if course.is_upstream and wishes.detached:
            raise InvalidRequest("what the upstream answers cannot be left and fetched later", param="Prefer")
        is_mirrored = bool(self._settings.url) and not wishes.detached and not side
        if not is_mirrored or random.random() >= self._settings.mirror:
            return course
        other = self._name(model, not course.is_upstream)
        return course._replace(is_mirrored=other is not None, other_model=other or "")

    def find_here(self, model: str) -> TextModel:
        """For what never goes upstream. Raises `ModelNotFound`."""
        return self._catalog.find(self._name(model, is_upstream=False) or model)

    def _course(self, model: str, side: str, wishes: Wishes) -> Course:
        if side:
            name = self._name(model, side == UPSTREAM)
            if name is None:
                raise ModelNotFound(f"the model {model[:80]!r} is not served {side}", param="model")
            return Course(side == UPSTREAM, name, "header" if side == UPSTREAM else "")
        draw = _draw(wishes)
        if alias := self.aliases.get(model):
            here = alias.on(is_upstream=False) if wishes.detached else None  # the upstream would refuse it
            target = here or alias.pick(draw)
            course = Course(target.is_upstream, target.model, "alias" if target.is_upstream else "")
        elif not wishes.detached and self._catalog.has(model) and draw < self._settings.share:
            course = Course(True, self._upstream_name(model), "share")
        else:
            course = Course(False, model)
        return course if course.is_upstream else self._unless_unready(model, course, wishes)

    def _unless_unready(self, model: str, course: Course, wishes: Wishes) -> Course:
        """A retry never leaves: what its first try began may still go on here."""
        stays = not self._settings.fallback or wishes.detached or wishes.idempotency_key
        if stays or not self._catalog.has(course.model):
            return course
        if self._readiness.takes(self._catalog.find(course.model).slug):
            return course
        return Course(True, self._name(model, True) or self._upstream_name(model), "fallback")

    def _side(self, request: web.Request) -> str:
        """What the client asks for, "" if nothing; without an upstream there is nothing to ask for."""
        side = request.headers.get(SERVE_HEADER, "").strip().lower() if self._settings.url else ""
        if side not in ("", HERE, UPSTREAM):
            raise InvalidRequest(f"{SERVE_HEADER} must be {HERE} or {UPSTREAM}", param=SERVE_HEADER)
        return side

    def _name(self, model: str, is_upstream: bool) -> str | None:
        """What that side calls the model, None if it does not serve it."""
        if alias := self.aliases.get(model):
            target = alias.on(is_upstream)
            return target.model if target is not None else None
        if is_upstream:
            return self._upstream_name(model)
        return model if self._catalog.has(model) else None

    def _upstream_name(self, model: str) -> str:
        return self._settings.model or model


def _draw(wishes: Wishes) -> float:
    """In [0, 1); the same for each try of one request, which so meets its first one."""
    if not wishes.idempotency_key:
        return random.random()
    digest = hashlib.blake2b(wishes.idempotency_key.encode(), digest_size=8, person=b"kvrelay-side").digest()
    return int.from_bytes(digest, "little") / 2**64
