"""The store's benchmarks, by section. A row has its limits beside what was measured: `min_...` and `max_...`.

A section is a function from what was asked to rows: to add one, name it in `SECTIONS`.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from schemas.blob import Quantisation
from services.bench import dedupe, eviction, lookup, store_codecs, store_merges, store_tiers
from services.bench.engine import load_model
from services.bench.trace import Request, made_up_trace, read_trace
from services.models.registry import resolve
from services.settings import Settings
from services.text.model import load_text

Row = dict[str, str | int | float]

MADE_UP_REQUESTS = 12_000
DEDUPE_REQUESTS = 2000  # some 50,000 blocks
PROSE_TOKENS = 512


class Asked(msgspec.Struct, frozen=True):
    """`trace` None: a made-up one. `redis_url` "": without Redis."""

    settings: Settings
    trace: Path | None
    eviction_sizes: Sequence[int]
    lookup_sizes: Sequence[int]
    redis_url: str = ""

    def requests(self) -> list[Request]:
        return made_up_trace(MADE_UP_REQUESTS) if self.trace is None else read_trace(self.trace)


def _eviction(asked: Asked) -> Iterator[Row]:
    return eviction.run(asked.requests(), asked.eviction_sizes, has_limits=asked.trace is not None)


def _dedupe(asked: Asked) -> Iterator[Row]:
    return dedupe.run(asked.requests()[:DEDUPE_REQUESTS])


def _lookup(asked: Asked) -> Iterator[Row]:
    return lookup.run(asked.lookup_sizes)


def _tiers(asked: Asked) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="kvrelay-bench-") as folder:
        yield from store_tiers.run(Path(folder), asked.redis_url)


def _codecs(asked: Asked) -> Iterator[Row]:
    settings = asked.settings
    model = load_model(settings)
    ids = store_codecs.prose(load_text(resolve(settings.compute.model, Path(settings.kv.data_dir))), PROSE_TOKENS)
    yield from store_codecs.codec_rows(model, ids, settings.kv.block_tokens)
    yield from store_codecs.kl_rows(model, ids, [q for q in Quantisation if q is not Quantisation.NONE])


def _merges(asked: Asked) -> Iterator[Row]:
    return store_merges.run()


SECTIONS: dict[str, Callable[[Asked], Iterator[Row]]] = {
    "eviction": _eviction,
    "dedupe": _dedupe,
    "lookup": _lookup,
    "tiers": _tiers,
    "codecs": _codecs,
    "merges": _merges,
}


def run(asked: Asked, sections: Sequence[str]) -> Iterator[Row]:
    for section in sections or SECTIONS:
        yield from SECTIONS[section](asked)
