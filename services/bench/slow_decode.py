"""What a slow decode costs the prompts beside it: nothing, where prefill has cores of its own."""

import asyncio
import statistics
from collections.abc import Iterator
from contextlib import AsyncExitStack

from services.bench.brake import slowed
from services.bench.gap import medians_of, rounded
from services.bench.load import Load, decode_pid, gaps_ms
from services.bench.percentiles import percentile
from services.settings import Settings

Row = dict[str, str | int | float]

SLOWED_BY_S = 0.01
MIN_RATIO = 0.98


def run(
    settings: Settings, nats_url: str, num_prompt: int, num_tokens: int, num_prompts: int, rounds: int
) -> Iterator[Row]:
    """Rounds of `num_prompts` prompts beside answers, with decode as it is and with each of its steps slowed, in turn;
    then medians. The decode worker must be a process of its own."""
    load = Load(settings, nats_url, num_prompt, num_tokens)
    named: Row = {"workers": "one of each", "decode_slowed_by_ms": 1000 * SLOWED_BY_S}
    step_s = asyncio.run(_measure(load, num_prompts))["p50_ms"] / 1000  # and warms up
    rows: list[dict[str, float]] = []
    for number in range(rounds):
        plain = asyncio.run(_measure(load, num_prompts))
        slow = asyncio.run(_measure(load, num_prompts, step_s))
        rows.append({**plain, **{f"slowed_{name}": value for name, value in slow.items()}})
        yield {**named, "round": number + 1, **rounded(rows[-1])}
    ratio = statistics.median(row["slowed_prompt_tok_s"] / row["prompt_tok_s"] for row in rows)
    named |= {"round": "medians"}
    yield {**named, **rounded(medians_of(rows)), "prompt_ratio": round(ratio, 3), "min_prompt_ratio": MIN_RATIO}


async def _measure(load: Load, num_prompts: int, step_s: float = 0.0) -> dict[str, float]:
    """Prompt tokens a second, and the usual gap of the answers; decode is slowed if its usual `step_s` is given."""
    async with await load.connect() as bus, AsyncExitStack() as stack:
        if step_s:
            stack.enter_context(slowed(await decode_pid(bus, load.slug), step_s, SLOWED_BY_S))
        answers = await stack.enter_async_context(load.answers(bus))
        prompts = await stack.enter_async_context(load.prompts(bus))
        began_s = await prompts.reaches(1)
        seconds = await prompts.reaches(1 + num_prompts) - began_s
        await answers.reaches(1)
    gaps = [gap for _, stream in answers.streams for gap in gaps_ms(stream)]
    return {"prompt_tok_s": num_prompts * load.num_prompt / seconds, "p50_ms": percentile(gaps, 0.5)}
