"""The models that this gateway can render and tokenise for, by every name that clients may use."""

from collections.abc import Mapping

from schemas.errors import ModelNotFound
from services.text.model import TextModel


class Catalog:
    """`names` maps a slug or another name to its model."""

    def __init__(self, names: Mapping[str, TextModel]) -> None:
        self._names = dict(names)
        self.models = {text.slug: text for text in names.values()}

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
