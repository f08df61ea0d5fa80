"""The store's benchmarks, by section. A row has its limits beside what was measured: `min_...` and `max_...`.

A section is a function from what was asked to rows: to add one, name it in `SECTIONS`.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from services.bench import dedupe, eviction, lookup
from services.bench.trace import Request, made_up_trace, read_trace
from services.settings import Settings

Row = dict[str, str | int | float]

MADE_UP_REQUESTS = 12_000
DEDUPE_REQUESTS = 2000  # some 50,000 blocks


class Asked(msgspec.Struct, frozen=True):
    """`trace` None: a made-up one."""

    settings: Settings
    trace: Path | None
    eviction_sizes: Sequence[int]
    lookup_sizes: Sequence[int]

    def requests(self) -> list[Request]:
        return made_up_trace(MADE_UP_REQUESTS) if self.trace is None else read_trace(self.trace)


def _eviction(asked: Asked) -> Iterator[Row]:
    return eviction.run(asked.requests(), asked.eviction_sizes, has_limits=asked.trace is not None)


def _dedupe(asked: Asked) -> Iterator[Row]:
    return dedupe.run(asked.requests()[:DEDUPE_REQUESTS])


def _lookup(asked: Asked) -> Iterator[Row]:
    return lookup.run(asked.lookup_sizes)


SECTIONS: dict[str, Callable[[Asked], Iterator[Row]]] = {
    "eviction": _eviction,
    "dedupe": _dedupe,
    "lookup": _lookup,
}


def run(asked: Asked, sections: Sequence[str]) -> Iterator[Row]:
    for section in sections or SECTIONS:
        yield from SECTIONS[section](asked)
