"""Reads every stored blob and hashes it again."""

from collections.abc import Callable

import msgspec

from kvstore.verify import damage_of
from services.kv.view import Choice, Held, StoreView


class Damage(msgspec.Struct, frozen=True):
    key: str
    tenant: str
    tier: str
    bytes: int
    why: str
    quarantined: bool


class Verdict(msgspec.Struct, frozen=True):
    """`damaged_pins`: pins that do not count because their file is not as it was written."""

    blocks: int
    bytes: int
    damaged: list[Damage]
    damaged_pins: list[str]

    @property
    def is_sound(self) -> bool:
        return not self.damaged and not self.damaged_pins


def verify(view: StoreView, choice: Choice, *, keep: bool, on_damage: Callable[[Damage], None]) -> Verdict:
    """Damaged blobs go to quarantine, unless they are to be kept where they are."""
    num_blocks = num_bytes = 0
    damaged = []
    for held in view.held(choice):
        why = _damage(held)
        if why is None:
            continue  # it went meanwhile
        num_blocks += 1
        num_bytes += held.entry.size
        if why:
            name = held.entry.name
            if not keep:
                held.tier.quarantine(name)
            damaged.append(Damage(name.key.hex(), name.tenant, held.tier.name, held.entry.size, why, not keep))
            on_damage(damaged[-1])
    return Verdict(num_blocks, num_bytes, damaged, view.pins.damaged())


def _damage(held: Held) -> str | None:
    """Looks twice: what was replaced between finding and judging it is no damage."""
    why = damage_of(held.entry.name, held.tier.pieces(held.entry.name))
    return damage_of(held.entry.name, held.tier.pieces(held.entry.name)) if why else why
