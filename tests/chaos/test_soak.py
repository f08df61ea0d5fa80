"""Thousands of short requests, many of them cancelled: nothing is left of them."""

import asyncio
import contextlib
import random
import time
from pathlib import Path

import aiohttp
import pytest

from schemas.errors import Cancelled
from schemas.subjects import DEFAULT_TENANT
from services.bus.cancels import cancel_job
from services.bus.connection import Bus
from tests.chaos import oracle, state
from tests.chaos.clients import Clients
from tests.chaos.mix import Kind, Order, Way
from tests.chaos.site import running_site
from tests.golden.passages import PASSAGES

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(3600)]

NUM_BLOCKS = 330  # more full blocks than a worker has pages: all of them have been used before anything is measured
FULL_BLOCK_CHARS = 330
PROMPT_CHARS = 90
NUM_WARM_UP = 100
NUM_AT_ONCE = 24
CANCELLED = 0.3
LONGEST_PATIENCE_S = 4.0
MORE_BYTES = 20_000_000
WAYS: list[Way] = ["nats", "sse", "http"]


async def test_requests_and_cancels_leave_nothing_behind(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    seed = request.config.getoption("--seed") or 1
    print(f"\nseed {seed}")
    small = {"KVRELAY_SCHEDULER_KV_MEMORY_BYTES": "450000000", "KVRELAY_API_RESUME_GRACE_S": "0.2"}
    async with running_site(tmp_path, num_decode=1, **small) as site:
        async with await Bus.connect(site.broker.url, "client") as bus:
            soak = Soak(site.up.http, bus, random.Random(seed))
            await soak.run(NUM_BLOCKS, prompt_chars=FULL_BLOCK_CHARS, cancelled=0.0)
            await soak.run(NUM_WARM_UP)
            await state.settled(site)
            before = await state.look(site)
            print(f"before: {before}", flush=True)
            await soak.run(request.config.getoption("--requests"))
            await state.settled(site)
            after = await state.returned(site, before, MORE_BYTES)
            print(f"after:  {after}\n{soak.cancelled} of {soak.asked} cancelled", flush=True)
        for job in await state.all_jobs(site.bus):
            assert (await oracle.stored_stream(site.bus, job)).end is not None, f"{job} has no end"
        assert site.complaints == []


class Soak:
    def __init__(self, http: str, bus: Bus, rng: random.Random) -> None:
        self.asked = 0
        self.cancelled = 0
        self._http = http
        self._bus = bus
        self._rng = rng

    async def run(self, count: int, prompt_chars: int = PROMPT_CHARS, cancelled: float = CANCELLED) -> None:
        """Returns when all are answered or cancelled and no connection is open any more."""
        last = self.asked + count
        started_s = time.monotonic()

        async def client(clients: Clients) -> None:
            while self.asked < last:
                self.asked += 1
                if self.asked % 100 == 0:
                    print(f"[{time.monotonic() - started_s:6.1f} s] {self.asked} asked", flush=True)
                await self._ask(clients, self._order(self.asked, prompt_chars), cancelled)

        async with aiohttp.ClientSession() as session:
            clients = Clients(self._bus, self._http, session, "soak", self._rng)
            await asyncio.gather(*(client(clients) for _ in range(NUM_AT_ONCE)))
        print(f"[{time.monotonic() - started_s:6.1f} s] {self.asked} over", flush=True)

    async def _ask(self, clients: Clients, order: Order, cancelled: float) -> None:
        """A client who does not cancel must be answered whole; one who does closes his connection or says so."""
        asking = asyncio.create_task(clients.run(order))
        if self._rng.random() >= cancelled:
            assert (await asking).whole, order
            return
        self.cancelled += 1
        await asyncio.wait([asking], timeout=self._rng.uniform(0.0, LONGEST_PATIENCE_S))
        if order.way == "nats":
            await cancel_job(self._bus, DEFAULT_TENANT, f"soak-{order.number}", Cancelled("the soak cancels it"))
            await asking
        else:
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking

    def _order(self, number: int, prompt_chars: int) -> Order:
        """Under a salt of its own: nothing of it is stored."""
        fields = {
            "prompt": self._rng.choice(PASSAGES)[:prompt_chars],
            "max_tokens": self._rng.randint(1, 8),
            "seed": number,
            "ignore_eos": True,
        }
        return Order(number, Kind(number, fields), f"soak-{number}", self._rng.choice(WAYS))
