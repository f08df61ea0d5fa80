"""CASES 25, end to end: what one process stored another one finds, however Python hashes in each."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from schemas.events import Done, Start, Token
from schemas.subjects import Lane
from schemas.wire import encode
from services.bus.connection import Bus
from services.bus.publish import submit_job
from services.bus.reader import follow
from services.bus.streams import ensure_consumers, ensure_streams
from services.models.registry import build_id
from tests.pipeline.processes import process
from tests.pipeline.tiny import SLUG, tiny_files, tiny_models

PROMPT = list(range(3, 103))  # six full blocks of 16, and four tokens


async def ask(bus: Bus, name: str) -> tuple[Start, list[int]]:
    job: dict[str, Any] = {
        "id": name, "prompt_token_ids": PROMPT, "max_tokens": 4, "temperature": 0.0, "ignore_eos": True,
    }  # fmt: skip
    await submit_job(bus, "default", SLUG, Lane.INTERACTIVE, encode(job))
    events = [event async for event in follow(bus, "default", name, 30.0)]
    assert isinstance(events[-1], Done)
    return (
        next(event for event in events if isinstance(event, Start)),
        [event.id for event in events if isinstance(event, Token)],
    )


@pytest.mark.parametrize("seeds", [(None, "random", "1")])
async def test_prefill_here_decode_there(broker: str, tmp_path: Path, seeds: tuple[str | None, ...]):
    async with await Bus.connect(broker, "client") as bus:
        await ensure_streams(bus, SLUG)
        await ensure_consumers(bus, SLUG, build_id(tiny_files(), tiny_models()[0].arithmetic.id))
        with ExitStack() as stack:
            decode, first, later = (
                stack.enter_context(process(role, broker, tmp_path, hash_seed=seed))
                for role, seed in zip(("decode", "prefill", "prefill"), seeds, strict=True)
            )
            for worker in (decode, first):
                worker.serve()
            cold, ids = await ask(bus, "cold")
            first.end()
            later.serve()
            warm, again = await ask(bus, "warm")
            for worker in (later, decode):
                worker.end()
    assert (cold.cached_tokens, warm.cached_tokens) == (0, len(PROMPT) - 1)
    assert again == ids
    num_blocks = len(PROMPT) // 16 + 1
    assert (first.counted["hits"], later.counted["hits"]) == (0, num_blocks)
    assert decode.counted["hits"] >= num_blocks and decode.counted["misses"] == 0
