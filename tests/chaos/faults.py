"""What a chaos run does to a site: one function a kind of fault, each over when it returns.

The third argument is how many seconds the fault may last. Each returns what it has done.
"""

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Awaitable, Callable, Iterator

from tests.chaos.site import Site

Fault = Callable[[Site, random.Random, float], Awaitable[str]]

PAST_THE_CLAIM_S = 3.5  # bus.ack_wait_s is 3
CLOCK_OFFSETS_S = (-400 * 86_400.0, -3 * 86_400.0, -7_200.0, -30.0, 30.0, 900.0, 7_200.0, 3 * 86_400.0, 400 * 86_400.0)
LONGEST_STALL_S = 5.0  # an owner is taken for dead after 8


async def kill_decode(site: Site, rng: random.Random, longest_s: float) -> str:
    return _signal(site, rng.choice(site.named("decode")), signal.SIGKILL)


async def kill_prefill(site: Site, rng: random.Random, longest_s: float) -> str:
    return _signal(site, rng.choice(site.named("prefill")), signal.SIGKILL)


async def kill_gateway(site: Site, rng: random.Random, longest_s: float) -> str:
    return _signal(site, "gateway", signal.SIGKILL)


async def kill_broker(site: Site, rng: random.Random, longest_s: float) -> str:
    away_s = rng.uniform(0.0, 2.0)
    site.broker.kill()
    await asyncio.sleep(away_s)
    site.broker.start()
    return f"away for {away_s:.1f} s"


async def restart_broker(site: Site, rng: random.Random, longest_s: float) -> str:
    away_s = rng.uniform(0.0, 2.0)
    await asyncio.to_thread(site.broker.stop)
    await asyncio.sleep(away_s)
    site.broker.start()
    return f"away for {away_s:.1f} s"


async def pause(site: Site, rng: random.Random, longest_s: float) -> str:
    """Mostly a decode worker: it has more jobs to be woken with."""
    name = rng.choice([*site.named("decode"), *site.named("decode"), *site.named("prefill")])
    seconds = rng.uniform(PAST_THE_CLAIM_S, max(longest_s, PAST_THE_CLAIM_S + 1))
    pid = site.up.pid(name)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)
    return f"{name} for {seconds:.1f} s"


async def freeze_store(site: Site, rng: random.Random, longest_s: float) -> str:
    seconds = rng.uniform(1.0, longest_s)
    site.control.freeze_store(seconds)
    await asyncio.sleep(seconds)
    return f"for {seconds:.1f} s"


async def fill_disk(site: Site, rng: random.Random, longest_s: float) -> str:
    """Filled again and again: the janitor makes room, and finds it taken."""
    seconds = rng.uniform(1.0, longest_s)
    if not site.disk.mounted:
        site.control.fill_disk(seconds)
        await asyncio.sleep(seconds)
        return f"for {seconds:.1f} s, by the processes' own system calls"
    for _ in range(10):
        site.disk.fill()
        await asyncio.sleep(seconds / 10)
    site.disk.free()
    return f"for {seconds:.1f} s"


async def shift_clock(site: Site, rng: random.Random, longest_s: float) -> str:
    """Of one running process, or of a role's processes and those that take their place. Lasts until the next one."""
    offset_s = rng.choice(CLOCK_OFFSETS_S)
    if rng.random() < 0.5:
        role = rng.choice(["decode", "prefill", "gateway"])
        site.control.shift_clock(offset_s, role=role)
        return f"{role} by {offset_s:+.0f} s"
    name = rng.choice([*site.named("decode"), *site.named("prefill")])
    site.control.shift_clock(offset_s, pid=site.up.pid(name))
    return f"{name} by {offset_s:+.0f} s"


async def cut_connections(site: Site, rng: random.Random, longest_s: float) -> str:
    links = list(site.proxy.links)
    chosen = links if rng.random() < 0.3 else rng.sample(links, min(len(links), rng.randint(1, 2)))
    for link in chosen:
        link.cut()
    return f"{len(chosen)} of {len(links)}"


async def stall_connections(site: Site, rng: random.Random, longest_s: float) -> str:
    links = list(site.proxy.links)
    chosen = links if rng.random() < 0.3 else rng.sample(links, min(len(links), rng.randint(1, 2)))
    seconds = rng.uniform(1.0, min(longest_s, LONGEST_STALL_S))
    await asyncio.gather(*(link.stall(seconds) for link in chosen))
    return f"{len(chosen)} of {len(links)} for {seconds:.1f} s"


KINDS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        kill_decode, kill_prefill, kill_gateway, kill_broker, restart_broker, pause,
        freeze_store, fill_disk, shift_clock, cut_connections, stall_connections,
    )
}  # fmt: skip


def in_turn(rng: random.Random) -> Iterator[str]:
    """Kinds without end, in random order, each as often as the others; but twice as many decode workers are killed."""
    while True:
        yield from rng.sample([*KINDS, kill_decode.__name__], len(KINDS) + 1)


def _signal(site: Site, name: str, number: signal.Signals) -> str:
    with contextlib.suppress(ProcessLookupError):  # it is being started again already
        os.kill(site.up.pid(name), number)
    return name
