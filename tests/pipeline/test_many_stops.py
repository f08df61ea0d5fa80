"""Many jobs, some of them cancelled at random moments of their lives: nothing of them stays (CASES 22 and 27)."""

import asyncio
import gc
import random
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import Cancelled
from schemas.events import Done, Error
from services.bus import hub as hub_module
from services.bus.cancels import cancel_job
from tests.pipeline.conftest import Pipelines
from tests.pipeline.leftovers import at_rest, nothing_left
from tests.pipeline.local import LocalPipeline

AT_ONCE = 24
MAX_GROWTH_BYTES = 20_000_000
MAX_GROWTH_OF_A_REQUEST_BYTES = 5_000


def job_of(number: int) -> dict[str, Any]:
    """Shared beginnings, several lengths, one or two choices, each with blocks of its own."""
    prompt = [3 + (number * step) % 250 for step in range(1, 20 + number % 50)]
    return {
        "prompt_token_ids": prompt, "max_tokens": 1 + number % 12, "n": 1 + number % 2, "seed": number,
        "ignore_eos": True, "cache_salt": str(number % 5),
    }  # fmt: skip


class Load:
    """Runs jobs, `AT_ONCE` at a time; a share of them is cancelled after up to `longest_s`."""

    def __init__(self, pipeline: LocalPipeline, share: float, longest_s: float) -> None:
        self.ends: dict[str, int] = {}
        self._pipeline = pipeline
        self._share = share
        self._longest_s = longest_s
        self._random = random.Random(7)
        self._places = asyncio.Semaphore(AT_ONCE)

    async def run(self, numbers: range) -> None:
        await asyncio.gather(*(self._one(number) for number in numbers))

    async def _one(self, number: int) -> None:
        async with self._places:
            job = await self._pipeline.submit(**job_of(number))
            cancelling = None
            if self._random.random() < self._share:
                cancelling = asyncio.create_task(self._cancel(job, self._random.uniform(0, self._longest_s)))
            end = (await self._pipeline.read(job)).end
            if cancelling is not None:
                await cancelling
            code = end.code if isinstance(end, Error) else "ok"
            assert isinstance(end, Done) or code == "cancelled"
            self.ends[code] = self.ends.get(code, 0) + 1

    async def _cancel(self, job: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await cancel_job(self._pipeline.bus, "default", job, Cancelled("changed its mind"))


async def test_every_job_cancelled_at_a_random_moment(
    tiny_pipelines: Pipelines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASES 22."""
    monkeypatch.setattr(hub_module, "KEEP_S", 0.05)
    async with tiny_pipelines(scheduler={"chunk_tokens": 16, "token_budget": 64}) as pipeline:
        await pipeline.ask(**job_of(1))
        before = await at_rest(pipeline)
        load = Load(pipeline, share=1.0, longest_s=0.6)
        await load.run(range(200))
        await nothing_left(pipeline, before)
        assert (await pipeline.ask(**job_of(1))).token_ids()
        print(load.ends)
        assert load.ends["cancelled"] > 50 and load.ends["ok"] > 5, "at both ends of their lives, too"


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_memory_after_two_thousand_jobs(tiny_pipelines: Pipelines) -> None:
    """CASES 27: 30 % aborted, after 200 to warm up."""
    async with tiny_pipelines(scheduler={"chunk_tokens": 16, "token_budget": 64}) as pipeline:
        load = Load(pipeline, share=0.3, longest_s=0.6)
        await load.run(range(200))
        before, memory, files = await at_rest(pipeline), anonymous_bytes(), num_files()
        sizes = []
        for first in range(0, 2000, 500):
            await load.run(range(first, first + 500))
            await nothing_left(pipeline, before)
            sizes.append(anonymous_bytes() - memory)
        print(f"growth after 500, 1,000, 1,500 and 2,000 jobs in bytes: {sizes}; ends: {load.ends}")
        assert sizes[-1] < MAX_GROWTH_BYTES
        assert (sizes[-1] - sizes[0]) / 1500 < MAX_GROWTH_OF_A_REQUEST_BYTES
        assert num_files() == files


def anonymous_bytes() -> int:
    """Memory of this process that no file backs, in core or swapped out."""
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    sizes = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines[1:])}
    return 1024 * (sizes["Anonymous"] + sizes["Swap"])


def num_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
