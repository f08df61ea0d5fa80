"""How much of what lies in a store."""

from collections import defaultdict

import msgspec

from services.kv.view import StoreView


class Total(msgspec.Struct, kw_only=True):
    """`ratio`: payload before the codec (and as quantised) by what is stored of it; 0 where there is nothing."""

    blocks: int = 0
    bytes: int = 0
    tokens: int = 0
    payload_bytes: int = 0
    stored_bytes: int = 0
    ratio: float = 0.0


class Totals(msgspec.Struct, kw_only=True):
    """`groups`: tier, tenant, model, codec, dtype, quantisation -> value -> total."""

    all: Total
    expired: Total
    pinned: Total
    unreadable: Total
    groups: dict[str, dict[str, Total]]
    quarantined_blocks: int
    quarantined_bytes: int
    pins: int
    damaged_pins: int


def totals(view: StoreView) -> Totals:
    groups: dict[str, dict[str, Total]] = defaultdict(lambda: defaultdict(Total))
    whole, expired, pinned, unreadable = Total(), Total(), Total(), Total()
    pins, now = view.pinned(), view.clock()
    for tier, entry in view.held():
        counted = [whole, groups["tier"][tier.name], groups["tenant"][entry.name.tenant]]
        header = entry.header
        if header is None:
            counted.append(unreadable)
        else:
            counted.append(groups["model"][view.model_of(header)])
            counted += [groups[name][getattr(header, name).name.lower()] for name in ("codec", "dtype", "quantisation")]
        counted += [expired] if entry.is_expired(now) else []
        counted += [pinned] if entry.name in pins else []
        for total in counted:
            total.blocks += 1
            total.bytes += entry.size
            if header is not None:
                total.tokens += header.tokens
                total.payload_bytes += header.payload_bytes
                total.stored_bytes += header.stored_bytes
    for total in [whole, expired, pinned, unreadable, *(t for group in groups.values() for t in group.values())]:
        total.ratio = round(total.payload_bytes / total.stored_bytes, 4) if total.stored_bytes else 0.0
    quarantined = [blob for tier in view.tiers for blob in tier.quarantined()]
    return Totals(
        all=whole,
        expired=expired,
        pinned=pinned,
        unreadable=unreadable,
        groups={name: dict(sorted(group.items())) for name, group in groups.items()},
        quarantined_blocks=len(quarantined),
        quarantined_bytes=sum(blob.size for blob in quarantined),
        pins=len(view.pins.pins()),
        damaged_pins=len(view.pins.damaged()),
    )
