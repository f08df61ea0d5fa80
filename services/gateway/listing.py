"""What `/v1/models` tells: the models that are served here, and the aliases that lead to them or to the upstream."""

import time
from collections.abc import Mapping

from msgspec import UNSET

from schemas.openai_answers import Model
from services.bus.beats import BeatTable
from services.gateway.aliases import Alias
from services.gateway.catalog import Catalog


class Listing:
    """An alias that has a model's own name takes its place, as it does for requests."""

    def __init__(self, catalog: Catalog, aliases: Mapping[str, Alias], beats: BeatTable) -> None:
        self._catalog = catalog
        self._aliases = aliases
        self._beats = beats
        self._created = int(time.time())

    def all(self) -> list[Model]:
        """The models that have live workers, and the aliases that somebody may answer: nobody is asked whether the
        upstream lives."""
        names = dict.fromkeys([*self._catalog.models, *self._aliases])
        return [self._told(name) for name in names if self._is_answered(name)]

    def one(self, name: str) -> Model:
        """Whether or not workers live. Raises `ModelNotFound`."""
        return self._told(name)

    def _is_answered(self, name: str) -> bool:
        alias = self._aliases.get(name)
        leads_away = alias is not None and alias.on(is_upstream=True) is not None
        return leads_away or bool(self._told(name).builds)

    def _told(self, name: str) -> Model:
        alias = self._aliases.get(name)
        if alias is None:
            return self._model(self._catalog.find(name).slug, [name])
        return self._model(name, [target.model for target in alias.targets if not target.is_upstream])

    def _model(self, id_: str, names: list[str]) -> Model:
        """`names`: what it may be answered by here. The upstream does not tell its context."""
        texts = [self._catalog.find(name) for name in names]
        builds = {
            beat.build
            for text in texts
            for beat in self._beats.alive(model=text.slug)
            if beat.role != "gateway"
        }  # fmt: skip
        return Model(
            id=id_,
            created=self._created,
            context_length=min((text.context_tokens for text in texts), default=UNSET),
            builds=sorted(builds),
        )
