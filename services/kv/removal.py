"""Taking blobs out of a store on purpose."""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from kvstore.inventory import Collected
from services.kv.view import Held, StoreView


class Condemned(NamedTuple):
    """`pinned` ones stay: who wants them gone says `unpin` first."""

    blobs: list[Held]
    pinned: int


class Removed(msgspec.Struct, frozen=True):
    blocks: int
    bytes: int
    pinned_left: int


def condemn(view: StoreView, found: Iterable[Held]) -> Condemned:
    pinned = view.pinned()
    everything = list(found)
    blobs = [held for held in everything if held.entry.name not in pinned]
    return Condemned(blobs, len(everything) - len(blobs))


def remove(condemned: Condemned) -> Removed:
    """Jobs that run miss what was removed, and compute it again."""
    gone = [held.entry.size for held in condemned.blobs if held.tier.remove(held.entry.name)]
    return Removed(len(gone), sum(gone), condemned.pinned)


def collect(view: StoreView) -> Collected:
    """What nobody can want, in all tiers."""
    pinned = view.pinned()
    each = [tier.collect(pinned) for tier in view.tiers]
    return Collected(*(sum(numbers) for numbers in zip(*each, strict=True)))
