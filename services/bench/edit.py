"""What an edited conversation costs: the first token of a chat whose last turn changed, beside a cold run of it."""

import asyncio
import statistics
import time
from collections.abc import Iterator

from schemas.errors import Internal
from services.bench.stream import RandomPrompts, Stream, ask
from services.bus.connection import Bus
from services.models.registry import resolve
from services.settings import Settings

NUM_TOKENS = 2


def run(
    settings: Settings, nats_url: str, num_prompt: int, num_turn: int, rounds: int
) -> Iterator[dict[str, str | int | float]]:
    """One row a round, and one of medians. `num_turn`: tokens of the last turn, all of which change.

    Raises `Internal` if an edited run and its cold run differ in a token.
    """
    files = resolve(settings.compute.model, settings.kv.data_dir)
    ids = RandomPrompts(files.vocab_size)
    colds, edits = [], []
    for number in range(rounds + 1):
        cold, edited = asyncio.run(_round(settings, nats_url, files.slug, ids, num_prompt - num_turn, num_turn))
        if cold.token_ids != edited.token_ids:
            raise Internal("an edited conversation was answered otherwise than its cold run")
        if number:  # the first round warms up
            colds.append(cold)
            edits.append(edited)
            yield {"round": number, **_row([cold], [edited])}
    yield {"round": "medians", "prompt_tokens": num_prompt, "turn_tokens": num_turn, **_row(colds, edits)}


async def _round(
    settings: Settings, nats_url: str, slug: str, ids: RandomPrompts, num_kept: int, num_turn: int
) -> tuple[Stream, Stream]:
    """The cold run has a salt of its own: the very same prompt, and nothing of it stored."""
    kept, before, after = ids(num_kept), ids(num_turn), ids(num_turn)
    async with await Bus.connect(nats_url, "bench", settings.bus) as bus:
        await ask(bus, slug, kept + before, NUM_TOKENS)
        edited = await ask(bus, slug, kept + after, NUM_TOKENS)
        return await ask(bus, slug, kept + after, NUM_TOKENS, salt=f"cold {time.time_ns()}"), edited


def _row(colds: list[Stream], edits: list[Stream]) -> dict[str, float]:
    ratios = [edit.ttft_s / cold.ttft_s for cold, edit in zip(colds, edits, strict=True)]
    return {
        "cold_ttft_ms": round(1000 * statistics.median(stream.ttft_s for stream in colds), 1),
        "edited_ttft_ms": round(1000 * statistics.median(stream.ttft_s for stream in edits), 1),
        "ratio": round(statistics.median(ratios), 4),
        "cached_tokens": statistics.median(stream.cached_tokens for stream in edits),
    }
