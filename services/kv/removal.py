"""Taking blobs out of a store on purpose."""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from services.kv.view import Held, StoreView


class Condemned(NamedTuple):
    """`pinned` ones stay: who wants them gone says `unpin` first."""

    blobs: list[Held]
    pinned: int


class Removed(msgspec.Struct, frozen=True):
    blocks: int
    bytes: int
    pinned_left: int


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    expired: int
    quarantined: int
    unfinished_files: int
    bytes: int


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
    """Removes what nobody can want, in all tiers: what has expired (but for pinned blocks) or is quarantined, and what
    dead writers left."""
    pinned, now = view.pinned(), view.clock()
    expired = [held for held in view.held() if held.entry.is_expired(now) and held.entry.name not in pinned]
    gone = remove(Condemned(expired, 0))
    each = [tier.tidy() for tier in view.tiers]
    return Collected(
        expired=gone.blocks,
        quarantined=sum(tidied.quarantined for tidied in each),
        unfinished_files=sum(tidied.parts for tidied in each),
        bytes=gone.bytes + sum(tidied.num_bytes for tidied in each),
    )
