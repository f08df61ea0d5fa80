"""What prompts cost the answers beside them: gaps between tokens of running answers, with long prompts and without."""

import asyncio
import statistics
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack

from services.bench.load import NUM_ANSWERS, Load, gaps_ms
from services.bench.percentiles import percentile
from services.settings import Settings

Row = dict[str, str | int | float]


def run(
    settings: Settings, nats_url: str, num_prompt: int, num_tokens: int, rounds: int, **named: str
) -> Iterator[Row]:
    """Rounds without prompts and with them in turn; the last row has medians, and the ratio of the gaps."""
    load = Load(settings, nats_url, num_prompt, num_tokens)
    asyncio.run(_measure(load, with_prompts=True))  # warms up
    rows: list[dict[str, float]] = []
    for number in range(rounds):
        quiet = asyncio.run(_measure(load, with_prompts=False))
        loaded = asyncio.run(_measure(load, with_prompts=True))
        rows.append({"p50_ms": quiet["p50_ms"], "p99_ms": quiet["p99_ms"]})
        rows[-1] |= {"loaded_p50_ms": loaded["p50_ms"], "loaded_p99_ms": loaded["p99_ms"]}
        rows[-1] |= {"prompt_tok_s": loaded["prompt_tok_s"]}
        yield {**named, "round": number + 1, **rounded(rows[-1])}
    medians = medians_of(rows)
    ratio = medians["loaded_p99_ms"] / medians["p99_ms"]
    yield {**named, "round": "medians", **rounded(medians), "p99_ratio": round(ratio, 3), "max_p99_ratio": 1.3}


def rounded(row: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in row.items()}


def medians_of(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


async def _measure(load: Load, *, with_prompts: bool) -> dict[str, float]:
    """The usual gap and that of one in a hundred, of all answers together; prompt tokens a second."""
    async with await load.connect() as bus, AsyncExitStack() as stack:
        prompts = await stack.enter_async_context(load.prompts(bus)) if with_prompts else None
        if prompts is not None:
            await prompts.reaches(1)
        began_s = time.perf_counter()
        streams = await asyncio.gather(*(load.answer(bus) for _ in range(NUM_ANSWERS)))
        seconds = time.perf_counter() - began_s
        num_prompts = sum(done_s > began_s for done_s, _ in prompts.streams) if prompts is not None else 0
    gaps = [gap for stream in streams for gap in gaps_ms(stream)]
    rate = num_prompts * load.num_prompt / seconds
    return {"p50_ms": percentile(gaps, 0.5), "p99_ms": percentile(gaps, 0.99), "prompt_tok_s": rate}
