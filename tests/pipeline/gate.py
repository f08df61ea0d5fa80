"""Stops the world at one point of a job's life: an async method waits there until the test opens the gate."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from schemas.subjects import Stage
from services.engine.saver import Saver
from services.worker.run import JobRun
from tests.pipeline.local import LocalPipeline, LocalWorker

TIMEOUT_S = 30.0


class Gate:
    """The call that comes after `number` others waits here; the later ones pass."""

    def __init__(self, number: int) -> None:
        self.reached = asyncio.Event()
        self.num_calls = 0
        self._number = number
        self._opened = asyncio.Event()

    async def wait(self) -> None:
        """Until somebody waits at the gate."""
        async with asyncio.timeout(TIMEOUT_S):
            await self.reached.wait()

    def open(self) -> None:
        self._opened.set()

    async def pass_through(self) -> None:
        self.num_calls += 1
        if self.num_calls == self._number + 1:
            self.reached.set()
            await self._opened.wait()


class Point(NamedTuple):
    """`find` says where: the object or class and its async method, and how many calls pass before."""

    name: str
    stage: Stage
    find: Callable[[LocalPipeline], tuple[Any, str, int]]
    after: bool = False  # when the call is over rather than before it

    @contextmanager
    def gate(self, pipeline: LocalPipeline) -> Iterator[Gate]:
        """Opened at the latest when the block ends."""
        owner, method, number = self.find(pipeline)
        gate, original = Gate(number), getattr(owner, method)

        async def gated(*args: Any, **kwargs: Any) -> Any:
            if not self.after:
                await gate.pass_through()
            result = await original(*args, **kwargs)
            if self.after:
                await gate.pass_through()
            return result

        is_own = method in vars(owner)
        setattr(owner, method, gated)
        try:
            yield gate
        finally:
            gate.open()
            setattr(owner, method, original) if is_own else delattr(owner, method)

    def worker(self, pipeline: LocalPipeline) -> LocalWorker:
        return pipeline.decode_worker if self.stage is Stage.DECODE else pipeline.prefill_worker


NUM_TOKENS = 8  # of the jobs that are stopped: the first comes from prefill, the others take a pass each

PREFILL_POINTS = [
    Point("before start", Stage.PREFILL, lambda p: (p.prefill.blocks, "restore", 0)),
    Point("after start", Stage.PREFILL, lambda p: (p.prefill.engine, "run", 0)),
    Point("mid chunk", Stage.PREFILL, lambda p: (p.prefill.engine, "run", 1)),
    Point("token 0 not stored", Stage.PREFILL, lambda p: (Saver, "stored_blocks", 0)),
    Point("stored, not handed off", Stage.PREFILL, lambda p: (JobRun, "publish", 0)),
    Point("handed off, not settled", Stage.PREFILL, lambda p: (p.prefill_worker.role, "work", 0), after=True),
]
DECODE_POINTS = [
    Point("claimed", Stage.DECODE, lambda p: (p.decode_worker.role, "work", 0)),
    Point("mid fetch", Stage.DECODE, lambda p: (p.decode.blocks, "restore", 0)),
    Point("first token", Stage.DECODE, lambda p: (p.decode.engine, "run", 0)),
    Point("mid stream", Stage.DECODE, lambda p: (p.decode.engine, "run", 3)),
    Point("last token", Stage.DECODE, lambda p: (p.decode.engine, "run", NUM_TOKENS - 2)),
    Point("ended, not settled", Stage.DECODE, lambda p: (p.decode_worker.role, "work", 0), after=True),
]
