"""What every process counts. Without a reader (see `export`) nothing is recorded; totals are kept for the beats."""

from collections import Counter as Totals
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from schemas import meter as schema


class Instrument(Protocol):
    def bind(self, meter: Meter) -> None: ...
    def unbind(self) -> None: ...


_instruments: list[Instrument] = []


class Counter:
    """Only ever grows. Attributes become labels, so they must take few values: never an id.

    `totals`: the sums, by the values of the attributes.
    """

    def __init__(self, name: str, unit: str, doc: str) -> None:
        self._args = (f"kvrelay.{name}", unit, doc)
        self._add: Callable[[float, Mapping[str, str]], None] | None = None
        self.totals: Totals[tuple[str, ...]] = Totals()
        _instruments.append(self)

    def add(self, value: int = 1, **attributes: str) -> None:
        self.totals[tuple(attributes.values())] += value
        if self._add is not None:
            self._add(value, attributes)

    def bind(self, meter: Meter) -> None:
        self._add = meter.create_counter(*self._args).add

    def unbind(self) -> None:
        self._add = None


class Histogram:
    """`counted`: how many values fell into each bucket of `schemas.meter`, which are finer than the exported ones."""

    def __init__(self, name: str, unit: str, doc: str, buckets: list[float]) -> None:
        self._args, self._buckets = (f"kvrelay.{name}", unit, doc), buckets
        self.counted: Totals[int] = Totals()
        self._record: Callable[[float, Mapping[str, str]], None] | None = None
        _instruments.append(self)

    def record(self, value: float, **attributes: str) -> None:
        self.counted[schema.bucket_of(value)] += 1
        if self._record is not None:
            self._record(value, attributes)

    def bind(self, meter: Meter) -> None:
        made = meter.create_histogram(*self._args, explicit_bucket_boundaries_advisory=self._buckets)
        self._record = made.record

    def unbind(self) -> None:
        self._record = None


class Gauge:
    """Read when somebody looks: `watch` says how, and the callback must be quick and thread-safe.

    None stands for "not known now".
    """

    def __init__(self, name: str, unit: str, doc: str) -> None:
        self._args = (f"kvrelay.{name}", unit, doc)
        self._watched: dict[tuple[tuple[str, str], ...], Callable[[], float | None]] = {}
        _instruments.append(self)

    def watch(self, read: Callable[[], float | None], **attributes: str) -> None:
        """From now on the value under these attributes is `read()`; the last one to watch wins."""
        self._watched[tuple(sorted(attributes.items()))] = read

    def _observe(self, _: CallbackOptions) -> Iterator[Observation]:
        for attributes, read in list(self._watched.items()):
            value = read()
            if value is not None:
                yield Observation(value, dict(attributes))

    def bind(self, meter: Meter) -> None:
        name, unit, doc = self._args
        meter.create_observable_gauge(name, [self._observe], unit, doc)

    def unbind(self) -> None:
        self._watched.clear()


def bind(meter: Meter) -> None:
    for instrument in _instruments:
        instrument.bind(meter)


def unbind() -> None:
    for instrument in _instruments:
        instrument.unbind()


_LATENCY_S = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0]

ttft_s = Histogram("ttft", "s", "from the job's publication to its first token", _LATENCY_S)
itl_s = Histogram("itl", "s", "between two tokens of a choice", _LATENCY_S)
prefix_tokens_asked = Counter("prefix_tokens_asked", "{token}", "prompt tokens looked up in the store")
prefix_tokens_hit = Counter("prefix_tokens_hit", "{token}", "prompt tokens taken from the store")
tokens = Counter("tokens", "{token}", "tokens computed, by kind: prompt or generated")
damage = Counter("damage", "{block}", "stored blocks that failed verification")
failed_loads = Counter("failed_loads", "{block}", "blocks that were promised and could not be used")
skipped_reads = Counter("skipped_reads", "{read}", "reads that a tier of the store was not asked for: it had failed")
skipped_writes = Counter(
    "skipped_writes", "{write}", "writes that a tier of the store was not asked for: it had failed"
)
disagreements = Counter("disagreements", "{token}", "published tokens that another worker computes otherwise")
jobs = Counter("jobs", "{job}", "jobs ended, by code: ok or an error code")
forwarded = Counter("forwarded", "{request}", "requests sent to the upstream, by why and by code")
mirrored = Counter("mirrored", "{request}", "requests that both sides answered, by outcome")
mirror_ttft_s = Histogram("mirror_ttft", "s", "to the first token of a request that both sides answered", _LATENCY_S)
mirror_total_s = Histogram("mirror_total", "s", "to the end of a request that both sides answered", _LATENCY_S)
queue_depth = Gauge("queue_depth", "{job}", "jobs waiting, by stage and lane")
pages_used = Gauge("pages_used", "{page}", "KV pages in use")
tier_open = Gauge("tier_open", "{tier}", "1 while a tier of the store is left alone, by way: read or write")
running = Gauge("running", "{sequence}", "sequences in the batch")


def meter() -> schema.Meter:
    """What this process has counted so far."""
    return schema.Meter(
        asked_tokens=prefix_tokens_asked.totals[()],
        hit_tokens=prefix_tokens_hit.totals[()],
        prompt_tokens=tokens.totals["prompt",],
        generated_tokens=tokens.totals["generated",],
        ttft=dict(ttft_s.counted),
        itl=dict(itl_s.counted),
    )
