"""Asks the model's canary again, in every minute in which the worker computed something."""

import asyncio
import logging

from schemas.errors import Internal
from services.worker.runtime import Runtime

log = logging.getLogger(__name__)

LOOK_S = 60.0


async def watch(runtime: Runtime, every_s: float = LOOK_S) -> None:
    """Until cancelled. Raises `Internal` once the canary's logits are other bits than at start: the process has to end,
    for nothing that it computes may be trusted. Its successor checks the model from the ground up."""
    canary, engine = runtime.canary, runtime.engine
    checked = engine.num_passes
    while True:
        await asyncio.sleep(every_s)
        if canary is None or engine.num_passes == checked:
            continue
        checked = engine.num_passes
        if not await engine.between_passes(canary.sings):
            log.error("ALARM: the model computes other logits for the canary prompt than at start; this worker ends")
            raise Internal("the canary's logits have changed: memory, a library or the processor cannot be trusted")
