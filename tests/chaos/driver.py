"""Runs jobs under faults, checks every stream as it ends, and counts."""

import asyncio
import contextlib
import itertools
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import aiohttp

from schemas.events import Done, Error
from schemas.subjects import DEFAULT_TENANT
from services.bus.beats import BeatTable
from services.bus.connection import Bus
from services.bus.reader import follow
from tests.chaos import faults, oracle
from tests.chaos.clients import SILENCE_S, Clients, Shown
from tests.chaos.mix import Kind, Order, order
from tests.chaos.site import Site

PROGRESS_S = 10.0
LOOK_S = 0.25
MAX_TRIES = 20  # of one order whose gateway dies again and again


@dataclass(frozen=True)
class Plan:
    """What a run must reach; it goes on with more jobs until it has, for at most `timeout_s`."""

    seed: int
    num_kinds: int
    num_jobs: int
    num_at_once: int
    fault_every_s: float
    longest_fault_s: float
    min_faults: int
    max_faults: int
    min_each_kind: int
    min_takeovers: int
    min_running: int
    timeout_s: float


@dataclass
class Tally:
    done: int = 0
    by_way: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    takeovers: int = 0
    cut_off: int = 0  # HTTP answers that a gateway took with it
    max_running: int = 0
    longest_silence_s: float = 0.0  # within a stream
    in_flight: int = 0

    def __str__(self) -> str:
        kinds = ", ".join(f"{name} {count}" for name, count in sorted(self.faults.items()))
        ways = ", ".join(f"{name} {count}" for name, count in sorted(self.by_way.items()))
        return (
            f"{self.done} jobs equal ({ways}), {self.in_flight} in flight, at most {self.max_running} running at once, "
            f"{self.takeovers} taken over in mid-stream, {self.cut_off} HTTP answers cut off, "
            f"at most {self.longest_silence_s:.1f} s of silence in a stream, "
            f"{self.faults.total()} faults ({kinds})"
        )


class Driver:
    """One run on a site whose reference streams are known. `bus` goes through the proxy: clients break as well."""

    def __init__(
        self, site: Site, bus: Bus, plan: Plan, references: dict[int, oracle.Stream], kinds: list[Kind]
    ) -> None:
        self.tally = Tally()
        self._site = site
        self._bus = bus
        self._plan = plan
        self._references = references
        self._kinds = kinds
        self._rng = random.Random(plan.seed)
        self._numbers = itertools.count()
        self._over = asyncio.Event()
        self._started_s = time.monotonic()

    async def run(self) -> Tally:
        """Raises what the first client or fault raises. No fault is left half done."""
        async with aiohttp.ClientSession() as session, asyncio.timeout(self._plan.timeout_s):
            clients = Clients(self._bus, self._site.up.http, session, f"chaos-{self._plan.seed}", self._rng)
            breaking = asyncio.create_task(self._break())
            others = [asyncio.create_task(each) for each in (self._load(clients), self._watch(), self._tell())]
            try:
                done, _ = await asyncio.wait([breaking, *others], return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in others:
                    task.cancel()
                self._over.set()
                await asyncio.gather(breaking, *others, return_exceptions=True)
        return self.tally

    async def _load(self, clients: Clients) -> None:
        """`num_at_once` clients, each with one order after the other."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._plan.num_at_once):
                group.create_task(self._client(clients))

    async def _client(self, clients: Clients) -> None:
        while self._wanted():
            self.tally.in_flight += 1
            await self._serve(clients, order(next(self._numbers), self._kinds, self._rng))
            self.tally.in_flight -= 1

    def _wanted(self) -> bool:
        """More than `num_jobs` only as long as faults or take-overs are missing."""
        tally, plan = self.tally, self._plan
        rarest = min(tally.faults[kind] for kind in faults.KINDS)
        broken = tally.faults.total() >= plan.min_faults and rarest >= plan.min_each_kind
        return not broken or tally.takeovers < plan.min_takeovers or tally.done + tally.in_flight < plan.num_jobs

    async def _serve(self, clients: Clients, wanted: Order) -> None:
        """Until the order was answered whole and right."""
        reference = self._references[wanted.kind.number]
        for _ in range(MAX_TRIES):
            shown = await clients.run(wanted)
            if shown.whole:
                break
            self.tally.cut_off += 1
            await self._check_cut_off(shown, reference)
        else:
            raise AssertionError(f"{wanted}: its gateway died {MAX_TRIES} times")
        assert shown.job is not None
        stream = await oracle.ended_stream(self._site.bus, shown.job)
        oracle.check_equal(shown.job, stream, reference)
        assert shown.texts == reference.texts, f"{shown.job} ({wanted.way}) was shown {shown.texts}"
        self.tally.done += 1
        self.tally.by_way[wanted.way] += 1
        self.tally.takeovers += stream.taken_over
        self.tally.longest_silence_s = max(self.tally.longest_silence_s, stream.longest_silence_s)

    async def _check_cut_off(self, shown: Shown, reference: oracle.Stream) -> None:
        """The job of a gateway that died ends all the same, and what was written of it is right."""
        if shown.job is None:
            return  # the last look at all streams finds it
        async for _ in follow(self._bus, DEFAULT_TENANT, shown.job, SILENCE_S):
            pass
        stream = await oracle.ended_stream(self._site.bus, shown.job)
        assert isinstance(stream.end, Done) or (isinstance(stream.end, Error) and stream.end.code == "cancelled"), (
            stream
        )
        assert oracle.is_beginning(stream, reference), shown.job

    async def _break(self) -> None:
        for kind in faults.in_turn(self._rng):
            if self.tally.faults.total() >= self._plan.max_faults and self.tally.takeovers >= self._plan.min_takeovers:
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._plan.fault_every_s * self._rng.uniform(0.6, 1.4)):
                    await self._over.wait()
                    return
            started_s = time.monotonic()
            what = await faults.KINDS[kind](self._site, self._rng, self._plan.longest_fault_s)
            self.tally.faults[kind] += 1
            self._say(f"{kind} {what}", started_s)
        await self._over.wait()

    async def _watch(self) -> None:
        """How many sequences run at once, as the decode workers say."""
        beats = BeatTable(self._site.bus)
        await beats.start()
        try:
            while True:
                running = sum(beat.running for beat in beats.alive("decode"))
                self.tally.max_running = max(self.tally.max_running, running)
                await asyncio.sleep(LOOK_S)
        finally:
            await beats.close()

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            self._say(str(self.tally), time.monotonic())

    def _say(self, text: str, at_s: float) -> None:
        print(f"[{at_s - self._started_s:6.1f} s] {text}", flush=True)
