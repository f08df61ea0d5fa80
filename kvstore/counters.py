"""What the store did since it was opened, as plain integers that services export."""

import threading
from collections import Counter
from dataclasses import dataclass, fields

_lock = threading.Lock()


@dataclass
class Counters:
    """`+=` on an attribute is not atomic between threads: `add` is."""

    def add(self, **amounts: int) -> None:
        with _lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)

    def snapshot(self) -> Counter[str]:
        with _lock:
            return Counter({field.name: getattr(self, field.name) for field in fields(self)})


@dataclass
class TierCounters(Counters):
    """`evicted` made room, `expired` had outlived their time, `quarantined` were damaged and moved out of the way.

    `skipped_reads` and `skipped_writes` were not tried because the tier had just failed.
    """

    expired: int = 0
    evicted: int = 0
    evicted_bytes: int = 0
    quarantined: int = 0
    skipped_reads: int = 0
    skipped_writes: int = 0


@dataclass
class StoreCounters(Counters):
    """`hits` and `misses` count `load`; damage, a mismatch and a failed read in every tier are misses as well.

    `damaged`, `mismatched` and `read_errors` count once a tier. `payload_bytes` is what `stored_bytes` was before
    quantising and codec; `kept` counts saves that found their block already there, `refused` those of blocks with NaN
    or infinity, which cannot be quantised; `copied` and `copies_dropped` the blocks that went from one tier to another,
    and those that would have, had there been room to wait for it.
    """

    hits: int = 0
    misses: int = 0
    damaged: int = 0
    mismatched: int = 0
    read_errors: int = 0
    read_bytes: int = 0
    writes: int = 0
    kept: int = 0
    write_errors: int = 0
    refused: int = 0
    payload_bytes: int = 0
    stored_bytes: int = 0
    copied: int = 0
    copies_dropped: int = 0
