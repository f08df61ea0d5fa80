"""A gateway under many streams: its CPU time an event beside a plain Starlette server, and what stalled readers cost.

The gateway is a process of its own and hears of the tokens over NATS, from a worker without a model; Starlette makes
its own. Both have the same readers, as many tokens, and steps at the same times. Rounds take turns, so that a drift
of the machine hits all. Beginnings and ends of answers are left out: the tokens between them are measured.
"""

import asyncio
import contextlib
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from schemas.errors import SetupError
from services.bench import peers
from services.bench.percentiles import percentile
from services.bench.speaker import Speaker
from services.bench.streams import Reader, get
from services.bus.connection import Bus
from services.bus.server import NatsServer
from services.config import to_env
from services.models.registry import resolve
from services.settings import Settings

NUM_GROUPS = 16
STALLED_SHARE = 0.1
READY_S = 30.0
LOOK_S = 0.05
WARM_UP_TOKENS = 10
CPU_TICK_S = 0.01  # what the system counts CPU time in
PATH = "/v1/chat/completions"
# Small enough that what a stalled reader leaves fills its share within a round, and it is cut off.
BUFFER_BYTES, WRITE_TIMEOUT_S = 4096, 1.0

Row = dict[str, str | int | float]


class Asked(NamedTuple):
    """`step_s`: between two tokens of a stream."""

    num_streams: int
    num_tokens: int
    step_s: float
    rounds: int


class Round(NamedTuple):
    """`cpu_us`: of the server's process, for each event that a reader got. `num_lost`: answers without an end."""

    cpu_us: float
    p50_ms: float
    p99_ms: float
    num_lost: int
    num_lost_stalled: int = 0


def run(settings: Settings, asked: Asked) -> Iterator[Row]:
    """A row a round of each kind, then one of medians and ratios."""
    with tempfile.TemporaryDirectory(prefix="kvrelay-bench-") as folder:
        yield from _rows(asyncio.run(_measure(settings, asked, folder)), asked)


def _rows(found: Mapping[str, list[Round]], asked: Asked) -> Iterator[Row]:
    for kind, rounds in found.items():
        for number, measured in enumerate(rounds):
            yield {"server": kind, "round": number + 1, **_rounded(measured)}
    cpu = [ours.cpu_us / plain.cpu_us for ours, plain in zip(found["gateway"], found["starlette"], strict=True)]
    p99 = [stalled.p99_ms / ours.p99_ms for ours, stalled in zip(found["gateway"], found["stalled"], strict=True)]
    yield {
        "round": "medians",
        "streams": asked.num_streams,
        "tokens": asked.num_tokens,
        "step_ms": 1000 * asked.step_s,
        **{f"{kind}_cpu_us": round(statistics.median(r.cpu_us for r in rounds), 1) for kind, rounds in found.items()},
        "cpu_ratio": round(statistics.median(cpu), 3),
        "max_cpu_ratio": 1.0,
        "stalled_p99_ratio": round(statistics.median(p99), 3),
        "max_stalled_p99_ratio": 1.2,
        "lost_beside_stalled": sum(measured.num_lost for measured in found["stalled"]),
        "lost_stalled": sum(measured.num_lost_stalled for measured in found["stalled"]),
    }


def _rounded(measured: Round) -> dict[str, float]:
    return {name: round(value, 2) for name, value in measured._asdict().items()}


async def _measure(settings: Settings, asked: Asked, folder: str) -> dict[str, list[Round]]:
    found: dict[str, list[Round]] = {"gateway": [], "stalled": [], "starlette": []}
    slug = resolve(settings.compute.model, Path(settings.kv.data_dir)).slug
    async with contextlib.AsyncExitStack() as stack:
        broker = stack.enter_context(NatsServer(Path(folder), settings=settings.bus))
        bus = await stack.enter_async_context(await Bus.connect(broker.url, "bench", settings.bus))
        speaker = Speaker(bus, slug, NUM_GROUPS)
        await speaker.start()
        stack.push_async_callback(speaker.close)
        gateway = await stack.enter_async_context(_gateway(settings, broker.url))
        starlette = await stack.enter_async_context(_starlette(asked))
        few = asked._replace(num_tokens=min(asked.num_tokens, WARM_UP_TOKENS))
        await _gateway_round(gateway, speaker, slug, few, 0)
        await _starlette_round(starlette, few)
        num_stalled = max(1, round(STALLED_SHARE * asked.num_streams))
        for _ in range(asked.rounds):
            found["gateway"].append(await _gateway_round(gateway, speaker, slug, asked, 0))
            found["starlette"].append(await _starlette_round(starlette, asked))
            found["stalled"].append(await _gateway_round(gateway, speaker, slug, asked, num_stalled))
    return found


class Server(NamedTuple):
    process: psutil.Process
    port: int

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)


async def _gateway_round(server: Server, speaker: Speaker, slug: str, asked: Asked, num_stalled: int) -> Round:
    body: dict[str, object] = {
        "model": slug,
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "max_tokens": asked.num_tokens,
    }
    go_on = asyncio.Event()
    quick, stalled = (
        [Reader(asked.num_tokens) for _ in range(num)] for num in (asked.num_streams - num_stalled, num_stalled)
    )
    reading = [asyncio.create_task(reader.read(server.port, PATH, body)) for reader in quick]
    stalling = [asyncio.create_task(reader.read(server.port, PATH, body, go_on)) for reader in stalled]
    writers = await speaker.begin(asked.num_streams)
    for reader in (*quick, *stalled):
        await reader.has_begun.wait()
    before_s = server.cpu_s()
    await speaker.say(writers, asked.num_tokens, asked.step_s)
    for reader in quick:
        await reader.has_all.wait()
    cpu_s = server.cpu_s() - before_s
    await speaker.end(writers, asked.num_tokens)
    go_on.set()
    await asyncio.gather(*reading, *stalling)
    return _round(cpu_s, quick, stalled)


async def _starlette_round(server: Server, asked: Asked) -> Round:
    readers = [Reader(asked.num_tokens) for _ in range(asked.num_streams)]
    reading = [asyncio.create_task(reader.read(server.port, PATH, {"model": "bench"})) for reader in readers]
    for reader in readers:
        await reader.has_begun.wait()
    before_s = server.cpu_s()
    assert await get(server.port, f"/begin?tokens={asked.num_tokens}")
    for reader in readers:
        await reader.has_all.wait()
    cpu_s = server.cpu_s() - before_s
    assert await get(server.port, "/end")
    await asyncio.gather(*reading)
    return _round(cpu_s, readers, [])


def _round(cpu_s: float, readers: list[Reader], stalled: list[Reader]) -> Round:
    late_s = [late for reader in readers for late in reader.late_s]
    return Round(
        cpu_us=1e6 * max(cpu_s, CPU_TICK_S) / len(late_s),
        p50_ms=1000 * percentile(late_s, 0.5),
        p99_ms=1000 * percentile(late_s, 0.99),
        num_lost=sum(not reader.is_done for reader in readers),
        num_lost_stalled=sum(not reader.is_done for reader in stalled),
    )


@contextlib.asynccontextmanager
async def _gateway(settings: Settings, nats_url: str) -> AsyncIterator[Server]:
    port = _free_port()
    api = msgspec.structs.replace(
        settings.api,
        host="127.0.0.1",
        port=port,
        metrics_port=-1,
        log_level="warning",
        stream_buffer_bytes=BUFFER_BYTES,
        write_timeout_s=WRITE_TIMEOUT_S,
    )
    bus = msgspec.structs.replace(settings.bus, url=nats_url)
    env = to_env(msgspec.structs.replace(settings, api=api, bus=bus))
    async with _running([sys.executable, "-P", "-m", "services.cli.main", "gateway"], port, env) as server:
        yield server


@contextlib.asynccontextmanager
async def _starlette(asked: Asked) -> AsyncIterator[Server]:
    """Raises `SetupError` where Starlette or uvicorn is missing."""
    port = _free_port()
    program = Path(peers.__file__).with_name("starlette_peer.py")
    arguments = [port, asked.step_s, NUM_GROUPS]
    async with _running([sys.executable, str(program), *map(str, arguments)], port, None) as server:
        yield server


@contextlib.asynccontextmanager
async def _running(command: list[str], port: int, env: dict[str, str] | None) -> AsyncIterator[Server]:
    process = subprocess.Popen(command, env=env)  # noqa: ASYNC220 (nothing runs beside it yet)
    try:
        async with asyncio.timeout(READY_S):
            while not await get(port, "/ready"):
                if process.poll() is not None:
                    raise SetupError(f"{' '.join(command[1:4])} did not start; is kvrelay[dev] installed?")
                await asyncio.sleep(LOOK_S)
        yield Server(psutil.Process(process.pid), port)
    finally:
        process.terminate()
        process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
