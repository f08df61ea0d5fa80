"""What prompts cost the answers beside them: gaps between tokens of running answers, with long prompts and without.

Through a running pipeline, as plain readers see it: some jobs generate all the time, and prompts that nobody has seen
come one after the other, with one token to answer.
"""

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from services.bench.percentiles import percentile
from services.bench.stream import MAX_PROMPT_ID, Stream, ask
from services.bus.connection import Bus
from services.models.registry import resolve
from services.settings import Settings

Row = dict[str, str | int | float]

NUM_ANSWERS = 4
ANSWER_PROMPT_TOKENS = 64
PROMPTS_IN_FLIGHT = 2  # one is computed while the next one comes


def run(
    settings: Settings, nats_url: str, num_prompt: int, num_tokens: int, rounds: int, **named: str
) -> Iterator[Row]:
    """Rounds without prompts and with them in turn; the last row has medians, and the ratio of the gaps."""
    slug = resolve(settings.compute.model, settings.kv.data_dir).slug
    bench = _Bench(settings, nats_url, slug, num_prompt, num_tokens)
    asyncio.run(bench.answers(with_prompts=True))  # warms up
    rows: list[Row] = []
    for number in range(rounds):
        quiet, _ = asyncio.run(bench.answers(with_prompts=False))
        loaded, rate = asyncio.run(bench.answers(with_prompts=True))
        rows.append({"p50_ms": quiet[0], "p99_ms": quiet[1], "loaded_p50_ms": loaded[0], "loaded_p99_ms": loaded[1]})
        rows[-1] |= {"prompt_tok_s": rate}
        yield {**named, "round": number + 1, **_rounded(rows[-1])}
    medians: Row = {name: statistics.median(float(row[name]) for row in rows) for name in rows[0]}
    ratio = float(medians["loaded_p99_ms"]) / float(medians["p99_ms"])
    yield {**named, "round": "medians", **_rounded(medians), "p99_ratio": round(ratio, 3), "max_p99_ratio": 1.3}


def _rounded(row: Row) -> Row:
    return {name: round(float(value), 2) for name, value in row.items()}


class _Bench:
    def __init__(self, settings: Settings, nats_url: str, slug: str, num_prompt: int, num_tokens: int) -> None:
        self._settings = settings
        self._nats_url = nats_url
        self._slug = slug
        self._num_prompt = num_prompt
        self._num_tokens = num_tokens
        self._random = random.Random(time.time_ns())

    async def answers(self, *, with_prompts: bool) -> tuple[tuple[float, float], float]:
        """The usual gap and that of one in a hundred, in ms, of all answers together; prompt tokens a second."""
        async with (
            await Bus.connect(self._nats_url, "bench", self._settings.bus) as bus,
            _maybe(self._prompts(bus) if with_prompts else None) as done,
        ):
            began_s = time.perf_counter()
            asked = [self._ask(bus, ANSWER_PROMPT_TOKENS, self._num_tokens) for _ in range(NUM_ANSWERS)]
            streams = await asyncio.gather(*asked)
            seconds = time.perf_counter() - began_s
        gaps_ms = [1000 * gap for stream in streams for gap in _gaps_s(stream)]
        return (percentile(gaps_ms, 0.5), percentile(gaps_ms, 0.99)), len(done) * self._num_prompt / seconds

    @asynccontextmanager
    async def _prompts(self, bus: Bus) -> AsyncIterator[list[float]]:
        """Prompts come as long as this lasts; when each had its token."""
        done: list[float] = []

        async def one_after_the_other() -> None:
            while True:
                await self._ask(bus, self._num_prompt, 1)
                done.append(time.perf_counter())

        tasks = [asyncio.create_task(one_after_the_other()) for _ in range(PROMPTS_IN_FLIGHT)]
        await asyncio.sleep(0.2)  # the first ones are under way
        done.clear()
        try:
            yield done
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, bus: Bus, num_prompt: int, num_tokens: int) -> Stream:
        prompt = [self._random.randrange(1000, MAX_PROMPT_ID) for _ in range(num_prompt)]
        return await ask(bus, self._slug, prompt, num_tokens)


@asynccontextmanager
async def _maybe(context: AbstractAsyncContextManager[list[float]] | None) -> AsyncIterator[list[float]]:
    if context is None:
        yield []
        return
    async with context as done:
        yield done


def _gaps_s(stream: Stream) -> list[float]:
    """From token 1 on: before it lies the hand-off."""
    times = stream.tokens_s[1:]
    return [later - earlier for earlier, later in itertools.pairwise(times)]
