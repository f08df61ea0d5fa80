"""The canary is asked after passes only, and a worker whose model changed ends."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from schemas.errors import Internal
from services.worker.canary import watch


class Engine:
    """Counts its passes; calls what is to be called between two of them."""

    num_passes = 0

    async def between_passes(self, call: Any) -> Any:
        return call()


class Canary:
    def __init__(self) -> None:
        self.sound = True
        self.asked = asyncio.Event()

    def sings(self) -> bool:
        self.asked.set()
        return self.sound


async def test_it_is_asked_when_something_was_computed() -> None:
    runtime: Any = SimpleNamespace(engine=Engine(), canary=Canary())
    watching = asyncio.create_task(watch(runtime, every_s=0.001))
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert not runtime.canary.asked.is_set()
    runtime.engine.num_passes += 1
    await asyncio.wait_for(runtime.canary.asked.wait(), 10)
    assert not watching.done()
    runtime.canary.sound = False
    runtime.engine.num_passes += 1
    with pytest.raises(Internal, match="canary"):
        await asyncio.wait_for(watching, 10)


async def test_a_model_without_one_is_left_alone() -> None:
    runtime: Any = SimpleNamespace(engine=Engine(), canary=None)
    watching = asyncio.create_task(watch(runtime, every_s=0.001))
    runtime.engine.num_passes += 1
    await asyncio.sleep(0.01)
    assert not watching.done()
    watching.cancel()
