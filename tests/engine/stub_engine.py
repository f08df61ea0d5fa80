"""An engine whose passes begin and end when a test says so."""

import asyncio
from collections.abc import Sequence as Seq

import torch

from kernels.page_form import PageForm
from services.engine.engine import Outcome, Work
from services.engine.pages import PagePool
from services.engine.sampler import Sampled
from services.engine.step_cost import StepCost

BLOCK_TOKENS = 16


def make_pool(num_pages: int = 8) -> PagePool:
    return PagePool(num_pages, PageForm(1, 1, BLOCK_TOKENS, 4, torch.float32), max_idle=4)


class StubEngine:
    """Samples token 7 for every sampler."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.step_cost = StepCost()
        self._passes: asyncio.Queue[tuple[list[Work], asyncio.Future[None]]] = asyncio.Queue()
        self._running: asyncio.Future[None] | None = None

    async def run(self, works: Seq[Work]) -> list[Outcome]:
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._passes.put_nowait((list(works), over))
        await over
        return [[Sampled(7, None) for _ in work.samplers] for work in works]

    async def begun(self) -> list[Work]:
        """The works of the next pass, once it runs."""
        works, self._running = await asyncio.wait_for(self._passes.get(), 5)
        return works

    def finish(self) -> None:
        """Ends the pass that `begun` told of."""
        assert self._running is not None
        self._running.set_result(None)

    async def whole(self) -> list[Work]:
        works = await self.begun()
        self.finish()
        return works

    @property
    def is_idle(self) -> bool:
        return self._passes.empty()
