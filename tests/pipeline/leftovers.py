"""What a pipeline holds, to see that a job left nothing behind: compare before and after, once it is idle."""

import asyncio
from typing import Any

from schemas.subjects import Lane, Stage
from services.bus.connection import Bus
from services.bus.hub import ReplyHub
from services.bus.jetstream import call
from services.bus.streams import Source
from tests.pipeline.local import LocalPipeline

TIMEOUT_S = 10.0
STILL_S = 0.1

Held = dict[str, Any]


async def at_rest(pipeline: LocalPipeline) -> Held:
    """What is held once nothing runs, nor is about to change by itself."""
    async with asyncio.timeout(TIMEOUT_S):
        last: Held = {}
        while (now := await held(pipeline)) != last or now["prefill jobs"] or now["decode jobs"]:
            last = now
            await asyncio.sleep(STILL_S)
    return now


async def held(pipeline: LocalPipeline) -> Held:
    found: Held = {"tasks": len(asyncio.all_tasks())}
    for bus in (pipeline.bus, pipeline.prefill_worker.bus, pipeline.decode_worker.bus):
        found |= {f"{bus.name.partition('-')[0]} {what}": number for what, number in _of_bus(bus).items()}
    for name, worker in (("prefill", pipeline.prefill_worker), ("decode", pipeline.decode_worker)):
        process, pool = worker.process, worker.runtime.pool
        found[f"{name} pages"] = pool.num_held
        found[f"{name} promised"] = pool.num_pages - pool.num_unreserved
        found[f"{name} places"] = process._room.num_sequences
        found[f"{name} waiting for a place"] = len(process._room._waiting)
        found[f"{name} runs"] = len(process._runs)
        found[f"{name} jobs"] = len(process._jobs)
        found[f"{name} admitted"] = len(process._admission._running) + len(process._admission._suspects)
        found[f"{name} sequences"] = len(worker.role.batch)
    for stage in Stage:
        source = Source(stage, Lane.INTERACTIVE, pipeline.text.slug, pipeline.decode.build)
        info = await call(pipeline.bus, f"CONSUMER.INFO.{source.stream}.{source.consumer}")
        found[f"{stage} pending"] = info["num_pending"], info["num_ack_pending"]
    return found


def _of_bus(bus: Bus) -> Held:
    return {
        "writers": bus.part(ReplyHub).num_writers,
        "expected replies": len(bus._inbox),
        "subscriptions": len(bus._client._subs),
        "listeners": len(bus._up) + len(bus._down),
    }


async def nothing_left(pipeline: LocalPipeline, before: Held) -> None:
    """Fails, saying what is left, unless the pipeline comes to hold what it held `before`."""
    after: Held = {}
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while (after := await held(pipeline)) != before:
                await asyncio.sleep(0.01)
    except TimeoutError:
        left = {name: (before[name], after.get(name)) for name in before if before[name] != after.get(name)}
        raise AssertionError(f"before and after: {left}") from None
