"""Names of models that stand for others, by weight: `upstream.aliases`."""

import itertools
from bisect import bisect_right
from typing import NamedTuple

from schemas.errors import SetupError

UPSTREAM = "upstream/"


class Target(NamedTuple):
    """`model`: its name there, here or upstream."""

    model: str
    is_upstream: bool


class Alias:
    """`weights` are positive; of `draws` in [0, 1) each target gets its part."""

    def __init__(self, targets: list[Target], weights: list[float]) -> None:
        self.targets = targets
        self._ends = list(itertools.accumulate(weights))

    def pick(self, draw: float) -> Target:
        return self.targets[min(bisect_right(self._ends, draw * self._ends[-1]), len(self.targets) - 1)]

    def on(self, is_upstream: bool) -> Target | None:
        """The first target on that side."""
        return next((target for target in self.targets if target.is_upstream == is_upstream), None)


def parse_aliases(text: str) -> dict[str, Alias]:
    """`a=x@9,upstream/y@1 b=z`: a target without a weight has 1. Raises `SetupError`."""
    found: dict[str, Alias] = {}
    for word in text.split():
        name, equals, spelled = word.partition("=")
        if not name or not equals or name in found:
            raise _bad(f"{word!r} is not NAME=TARGET@WEIGHT,... with a name of its own")
        parts = [_target(part) for part in spelled.split(",")]
        found[name] = Alias([target for target, _ in parts], [weight for _, weight in parts])
    return found


def _target(text: str) -> tuple[Target, float]:
    model, _, spelled = text.partition("@")
    try:
        weight = float(spelled or 1.0)
    except ValueError:
        weight = 0.0
    is_upstream = model.startswith(UPSTREAM)
    model = model.removeprefix(UPSTREAM)
    if not model or not 0.0 < weight < float("inf"):
        raise _bad(f"{text!r} is not TARGET@WEIGHT with a weight above 0")
    return Target(model, is_upstream), weight


def _bad(why: str) -> SetupError:
    return SetupError(f"upstream.aliases: {why}", param="upstream.aliases")
