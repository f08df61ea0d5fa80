"""What a batch costs those who ask beside it: the first token on an idle pipeline, and while a gateway runs a batch.

The limit is what cannot be helped: the pass under way is waited for, which is a chunk of a line's prompt, and a step.
"""

import asyncio
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from schemas.batch import ENDED, Batch, BatchRecord
from schemas.errors import Internal
from services.batch.ordering import cancel_batch, new_batch
from services.batch.results import stored
from services.batch.shelf import Shelf
from services.bench.door import PATH, ttft_s
from services.bench.percentiles import percentile
from services.bench.stream import RandomPrompts, ask
from services.bus.connection import Bus
from services.models.registry import resolve
from services.settings import Settings

SLACK_S = 0.010
LOOK_S = 0.05
COST_ROUNDS = 5
STEPS = 40
WARM_UP = 5
ANSWER_TOKENS = 4  # of who asks beside the batch
MAX_PAUSE_S = 0.1  # between two of them: they come at any point of a pass

Row = dict[str, str | int | float]


class Asked(NamedTuple):
    """`num_requests`: of a round, beside the batch, and as many without. `line_tokens`: of the prompt of a line."""

    num_requests: int
    rounds: int
    prompt_tokens: int
    line_tokens: int
    line_answer_tokens: int
    num_lines: int


class Costs(NamedTuple):
    """Of a chunk, the last of a line's prompt, and of a step, both alone."""

    chunk_s: float
    step_s: float


class Round(NamedTuple):
    """The times to the first token; `lines_per_s` of the batch beside."""

    idle_s: list[float]
    beside_s: list[float]
    lines_per_s: float


def run(settings: Settings, http: str, nats_url: str, asked: Asked) -> Iterator[Row]:
    """A row a round, then one of all requests with the limit. Raises `Internal` if the batch ended meanwhile."""
    costs, rounds = asyncio.run(_measure(settings, http, nats_url, asked))
    for number, measured in enumerate(rounds):
        yield {"round": number + 1, **_row([measured])}
    whole = _row(rounds)
    limit_s = whole["idle_p99_ms"] / 1000 + costs.chunk_s + costs.step_s + SLACK_S
    yield {
        "round": "all",
        "requests": len(rounds) * asked.num_requests,
        "prompt_tokens": asked.prompt_tokens,
        "line_tokens": asked.line_tokens,
        **whole,
        "chunk_ms": round(1000 * costs.chunk_s, 2),
        "step_ms": round(1000 * costs.step_s, 2),
        "max_beside_p99_ms": round(1000 * limit_s, 2),
    }


def _row(rounds: list[Round]) -> dict[str, float]:
    idle_s = [each for measured in rounds for each in measured.idle_s]
    beside_s = [each for measured in rounds for each in measured.beside_s]
    found = {
        "idle_p50_ms": percentile(idle_s, 0.5),
        "idle_p99_ms": percentile(idle_s, 0.99),
        "beside_p50_ms": percentile(beside_s, 0.5),
        "beside_p99_ms": percentile(beside_s, 0.99),
        "beside_max_ms": max(beside_s),
    }
    rate = statistics.fmean(measured.lines_per_s for measured in rounds)
    return {**{name: round(1000 * value, 2) for name, value in found.items()}, "lines_per_s": round(rate, 2)}


async def _measure(settings: Settings, http: str, nats_url: str, asked: Asked) -> tuple[Costs, list[Round]]:
    async with await Bus.connect(nats_url, "bench", settings.bus) as bus:
        site = _Site(settings, http, bus, asked)
        await site.ttfts_s(WARM_UP)
        costs = await site.costs()
        return costs, [await site.round() for _ in range(asked.rounds)]


class _Site:
    def __init__(self, settings: Settings, http: str, bus: Bus, asked: Asked) -> None:
        files = resolve(settings.compute.model, settings.kv.data_dir)
        self._slug = files.slug
        self._prompts = RandomPrompts(files.vocab_size)
        self._chunk_tokens = settings.scheduler.chunk_tokens
        self._http = http
        self._bus = bus
        self._tenant = settings.bus.tenant
        self._shelf = Shelf(bus, self._tenant)
        self._asked = asked
        self._random = random.Random(time.time_ns())

    async def costs(self) -> Costs:
        line_tokens = self._asked.line_tokens
        chunk_tokens = min(self._chunk_tokens, line_tokens - 1)
        chunks_s, steps_s = [], []
        for _ in range(COST_ROUNDS):
            whole = await ask(self._bus, self._slug, self._prompts(line_tokens), 1)
            part = await ask(self._bus, self._slug, self._prompts(line_tokens - chunk_tokens), STEPS)
            chunks_s.append(whole.prefill_s - part.prefill_s)
            steps_s.append(1 / part.tokens_per_s)
        return Costs(max(0.0, statistics.median(chunks_s)), statistics.median(steps_s))

    async def round(self) -> Round:
        idle_s = await self.ttfts_s(self._asked.num_requests)
        async with self._batch() as name:
            before, began_s = await self._num_done(name), time.perf_counter()
            beside_s = await self.ttfts_s(self._asked.num_requests)
            rate = (await self._num_done(name) - before) / (time.perf_counter() - began_s)
            _, record = await self._shelf.batch(name)
            if record.batch.status in ENDED:
                raise Internal("the batch ended before all had asked: give it more lines")
        return Round(idle_s, beside_s, rate)

    async def ttfts_s(self, number: int) -> list[float]:
        """One after the other, each a while after the one before."""
        found = []
        for _ in range(number):
            await asyncio.sleep(self._random.uniform(0.0, MAX_PAUSE_S))
            body = self._body(self._prompts(self._asked.prompt_tokens), ANSWER_TOKENS)
            found.append(await ttft_s(self._http, body))
        return found

    @asynccontextmanager
    async def _batch(self) -> AsyncIterator[str]:
        """One that runs in the gateway as long as this lasts."""
        file = await self._shelf.put_file(self._lines(), "bench.jsonl", "batch")
        made = new_batch(file.id, PATH, "24h", self._bus.now())
        await self._shelf.put_batch(BatchRecord(batch=made))
        try:
            await self._reached(made.id, lambda batch: batch.request_counts.completed > 0)
            yield made.id
        finally:
            await cancel_batch(self._shelf, made.id, self._bus.now())
            await self._reached(made.id, lambda batch: batch.status in ENDED)

    async def _reached(self, name: str, what: Callable[[Batch], bool]) -> None:
        """Until the batch's record says so."""
        while True:
            _, record = await self._shelf.batch(name)
            if what(record.batch):
                return
            await asyncio.sleep(LOOK_S)

    async def _num_done(self, name: str) -> int:
        return sum([1 async for _ in stored(self._bus, self._tenant, name)])

    async def _lines(self) -> AsyncIterator[bytes]:
        for number in range(self._asked.num_lines):
            body = self._body(self._prompts(self._asked.line_tokens), self._asked.line_answer_tokens)
            line = {"custom_id": str(number), "method": "POST", "url": PATH, "body": body}
            yield json.dumps(line).encode() + b"\n"

    def _body(self, prompt: list[int], num_tokens: int) -> dict[str, object]:
        return {"model": self._slug, "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
