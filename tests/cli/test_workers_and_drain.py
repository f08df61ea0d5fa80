"""`kvrelay workers` and `kvrelay drain` against workers that only beat and listen."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from schemas.beat import Beat, ProcessRole
from schemas.drain import DrainReply
from services.bus.beats import BeatPublisher
from services.bus.connection import Bus
from services.bus.drain import DrainListener
from tests.bus.throwaway import throwaway_server
from tests.cli.test_cli_commands import kvrelay


class Worker:
    """Leaves when it is told to, after it has shown its last job."""

    def __init__(self, bus: Bus, name: str, role: ProcessRole) -> None:
        self._beat = Beat(
            process=name, role=role, state="ok", model="m", build="b" * 12, running=2, capacity=16, host="h", uptime_s=5
        )
        self._publisher = BeatPublisher(bus, lambda: self._beat)
        self._ear = DrainListener(bus, name, self._on_drain)
        self._leaving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._ear.start()
        await self._publisher.start()

    def _on_drain(self) -> DrainReply:
        self._leaving = asyncio.get_running_loop().create_task(self._leave())
        return DrainReply(process=self._beat.process, grace_s=5.0, running=2)

    async def _leave(self) -> None:
        self._becomes("draining", 1)
        await self._publisher.beat()
        self._becomes("stopped", 0)
        await self.close()

    def _becomes(self, state: str, running: int) -> None:
        self._beat = Beat(process=self._beat.process, role=self._beat.role, state=state, running=running)  # type: ignore[arg-type]

    async def close(self) -> None:
        await self._publisher.close()
        await self._ear.close()


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    """A NATS with a prefill worker, two decode workers and a gateway on it."""
    with throwaway_server(tmp_path / "nats") as server:
        async with await Bus.connect(server.url, "workers") as bus:
            roles: dict[str, ProcessRole] = {
                "prefill-1": "prefill", "decode-1": "decode", "decode-2": "decode", "gateway-1": "gateway"
            }  # fmt: skip
            workers = [Worker(bus, name, role) for name, role in roles.items()]
            for worker in workers:
                await worker.start()
            yield server.url
            for worker in workers:
                await worker.close()


async def test_workers_are_listed_and_leave_when_they_are_told_to(url: str, tmp_path: Path) -> None:
    async def run(*arguments: str, exit_code: int = 0) -> list[str]:
        done = await asyncio.to_thread(kvrelay, *arguments, "--nats", url, cwd=tmp_path)
        assert done.returncode == exit_code, done.stderr
        return (done.stdout + done.stderr).splitlines()

    (head, *rows), described, refused = await asyncio.gather(
        run("workers"), run("workers", "--json"), run("drain", "decode-1", "nobody", "gateway-1", exit_code=1)
    )
    assert head.split() == ["NAME", "ROLE", "MODEL", "BUILD", "STATE", "RUNNING", "HOST", "SINCE"]
    names = ["decode-1", "decode-2", "prefill-1"]
    assert [row.split()[:7] for row in rows] == [
        [name, name.partition("-")[0], "m", "b" * 12, "ok", "2/16", "h"] for name in names
    ]
    assert [json.loads(line)["process"] for line in described] == names
    assert "no worker nobody, gateway-1; these are alive: decode-1, decode-2, prefill-1" in refused[0]
    told, *_, last = await run("drain", "decode-2")
    assert (told, last) == ("decode-2: drains, 2 running, gone within 5 s", "decode-2: gone")
    assert len(await run("drain", "decode-1", "--no-wait")) == 1
    assert (await run("drain", "--all"))[-1] == "prefill-1: gone"
    listed, refused = await asyncio.gather(run("workers"), run("drain", "--all", exit_code=1))
    assert listed == ["no worker is alive: start one with `kvrelay up`, `kvrelay prefill` or `kvrelay decode`"]
    assert "no worker is alive there" in refused[0]
