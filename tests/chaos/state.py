"""What a site holds when it has nothing to do, and that it holds no more after a run than before."""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from schemas.subjects import DEAD_STREAM, DEFAULT_TENANT, REPLIES_STREAM, reply_subject
from services.bus.connection import Bus
from services.bus.jetstream import call
from tests.chaos.control import Holdings
from tests.chaos.site import Site
from tests.chaos.vitals import anonymous_bytes, num_descriptors, num_threads

SETTLE_TIMEOUT_S = 90.0
LOOK_S = 0.5
MORE_THREADS = 6
MORE_DESCRIPTORS = 3  # the store's counter, tombstones and list of victims are opened when they are first needed


@dataclass
class Vitals:
    """Of one process."""

    memory_bytes: int
    descriptors: int
    threads: int
    holdings: Holdings


@dataclass
class State:
    """`subscriptions`: of each role's connections, sorted."""

    processes: dict[str, Vitals]
    subscriptions: dict[str, list[int]]

    def __str__(self) -> str:
        rows = [
            f"{name}: {v.memory_bytes / 1e6:.0f} MB, {v.descriptors} descriptors, {v.threads} threads, "
            f"{sum(v.holdings.tasks.values())} tasks"
            for name, v in self.processes.items()
        ]
        return "; ".join([*rows, f"subscriptions {self.subscriptions}"])


async def look(site: Site) -> State:
    processes = {}
    for name in site.up.names:
        pid = site.up.pid(name)
        holdings = await site.control.holdings(pid)
        processes[name] = Vitals(anonymous_bytes(pid), num_descriptors(pid), num_threads(pid), holdings)
    subscriptions: dict[str, list[int]] = {}
    for connection in site.connections():
        role = str(connection.get("name", "")).partition("-")[0]
        subscriptions.setdefault(role, []).append(connection["subscriptions"])
    return State(processes, {role: sorted(counts) for role, counts in subscriptions.items()})


async def settled(site: Site) -> None:
    """Returns once no queue, consumer or file says that anything goes on. Raises `AssertionError` after a while."""
    try:
        async with asyncio.timeout(SETTLE_TIMEOUT_S):
            while left := await _left(site):
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        raise AssertionError(f"still there after {SETTLE_TIMEOUT_S:.0f} s: {left}") from None


async def _left(site: Site) -> list[str]:
    """What a pipeline at rest has none of, in words."""
    left = []
    for stream in await _streams(site.bus):
        name, messages = stream["config"]["name"], stream["state"]["messages"]
        if stream["config"]["retention"] == "workqueue" or name == DEAD_STREAM:
            left += [f"{messages} messages in {name}"] if messages else []
        for consumer in (await call(site.bus, f"CONSUMER.LIST.{name}"))["consumers"]:
            pending = consumer["num_pending"] + consumer["num_ack_pending"]
            if pending or name == REPLIES_STREAM:
                left.append(f"{name} {consumer['name']}: {pending} pending")
    left += [f"{path}" for path in (site.up.data_dir / "kv" / "tmp").glob("*.part")]
    for name in site.up.names:
        held = (await site.control.holdings(site.up.pid(name))).held
        left += [f"{name} has {count} {what}" for what, count in held.items() if count and what != "pages promised"]
    return left


async def _streams(bus: Bus) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await call(bus, "STREAM.LIST"))["streams"]
    return found


async def all_jobs(bus: Bus) -> list[str]:
    """The id of every job that has a reply subject."""
    prefix = reply_subject(DEFAULT_TENANT, "")
    info = await call(bus, f"STREAM.INFO.{REPLIES_STREAM}", {"subjects_filter": f"{prefix}>"})
    return [subject.removeprefix(prefix) for subject in info["state"].get("subjects") or {}]


async def returned(site: Site, before: State, more_bytes: int) -> State:
    """Waits until the site holds no more than `before`: killed processes must be back, idle ones have let go.

    Raises `AssertionError` with what is left after a while.
    """
    deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
    while True:
        try:
            after = await look(site)
            _check_no_more(before, after, more_bytes)
            return after
        except (AssertionError, OSError):
            if time.monotonic() > deadline_s:
                raise
        await asyncio.sleep(LOOK_S)


def _check_no_more(before: State, after: State, more_bytes: int) -> None:
    """Threads of pools and the store's books come one by one as they are needed, so few more of those are no leak."""
    assert after.subscriptions == before.subscriptions
    for name, then in before.processes.items():
        now = after.processes[name]
        more = Counter(now.holdings.tasks) - Counter(then.holdings.tasks)
        assert not more, f"{name} has tasks that it did not have: {more}"
        most = then.descriptors + MORE_DESCRIPTORS
        assert now.descriptors <= most, f"{name}: {now.descriptors} descriptors, were {then.descriptors}"
        assert now.threads <= then.threads + MORE_THREADS, f"{name}: {now.threads} threads, were {then.threads}"
        grown = now.memory_bytes - then.memory_bytes
        assert grown <= more_bytes, f"{name} has grown by {grown / 1e6:.0f} MB"
