"""The models that this gateway can render and tokenise for, by every name that clients may use."""

import time
from collections.abc import Mapping

from schemas.errors import ModelNotFound
from schemas.openai_answers import Model
from services.bus.beats import BeatTable
from services.text.model import TextModel


class Catalog:
    """`names` maps a slug or another name to its model."""

    def __init__(self, names: Mapping[str, TextModel]) -> None:
        self._names = dict(names)
        self.models = {text.slug: text for text in names.values()}
        self._created = int(time.time())

    @property
    def default(self) -> str:
        """For routes whose requests name no model."""
        return next(iter(self.models))

    def has(self, name: str) -> bool:
        return name in self._names

    def find(self, name: str) -> TextModel:
        """Raises `ModelNotFound`."""
        found = self._names.get(name)
        if found is None:
            known = ", ".join(self.models)
            raise ModelNotFound(f"the model {name[:80]!r} does not exist; this gateway serves {known}", param="model")
        return found

    def listed(self, beats: BeatTable) -> list[Model]:
        """The models that have live workers."""
        return [self._model(text, builds) for text in self.models.values() if (builds := builds_of(beats, text.slug))]

    def one(self, name: str, beats: BeatTable) -> Model:
        """Whether or not workers live. Raises `ModelNotFound`."""
        text = self.find(name)
        return self._model(text, builds_of(beats, text.slug))

    def _model(self, text: TextModel, builds: list[str]) -> Model:
        return Model(id=text.slug, created=self._created, context_length=text.context_tokens, builds=builds)


def builds_of(beats: BeatTable, slug: str) -> list[str]:
    return sorted({beat.build for beat in beats.alive(model=slug) if beat.role != "gateway"})
