"""Workers are replaced in order, and none goes before its successor serves."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from schemas.errors import SetupError
from services.bus.beats import BeatTable
from services.bus.connection import Bus
from services.bus.server import NatsServer
from services.supervisor.child import Child, Program
from services.supervisor.rollout import Newcomer, Pair, Rollout, rounds
from tests.bus.throwaway import throwaway_server
from tests.supervisor import beating_worker

GRACE_S = 10.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with throwaway_server(tmp_path_factory.mktemp("rollout")) as running:
        yield running


class Pipeline:
    """Children as the supervisor keeps them. `left`: who was told to go, in order."""

    def __init__(self, url: str, beats: BeatTable, log: Path) -> None:
        self._url = url
        self._log = log
        self.children: list[Child] = []
        self.keeping: list[asyncio.Task[None]] = []
        self.steps: list[str] = []
        self.rollout = Rollout(beats, GRACE_S, self.start, self.replace, self.steps.append)

    def program(self, name: str, text: str = "same") -> Program:
        role = name.partition("-")[0]
        argv = [sys.executable, "-P", beating_worker.__file__, self._url, role, text, str(self._log)]
        return Program(name, argv, dict(os.environ))

    def start(self, old: Child | None, program: Program) -> Newcomer:
        child = Child(program)
        self.keeping.append(asyncio.create_task(child.keep()))
        return Newcomer(old or child, child, self.keeping[-1])

    def replace(self, newcomer: Newcomer) -> None:
        self.children[self.children.index(newcomer.old)] = newcomer.child

    def pairs(self, programs: list[Program]) -> list[Pair]:
        return list(zip(self.children, programs, strict=True))

    @property
    def left(self) -> list[str]:
        return self._log.read_text(encoding="utf-8").splitlines() if self._log.exists() else []


@pytest.fixture
async def pipeline(server: NatsServer, tmp_path: Path) -> AsyncIterator[Pipeline]:
    """Two prefill workers and a decode worker that serve."""
    async with await Bus.connect(server.url, "supervisor") as bus:
        beats = BeatTable(bus)
        await beats.start()
        found = Pipeline(server.url, beats, tmp_path / "left")
        for name in ("prefill-0", "prefill-1", "decode-0"):
            found.children.append(found.start(None, found.program(name)).child)
        await beats.wait_for(lambda table: len(table.alive()) == 3)
        yield found
        await asyncio.gather(*(child.stop(GRACE_S) for child in found.children))
        await asyncio.gather(*found.keeping, return_exceptions=True)
        await beats.close()


def test_a_round_has_one_worker_of_each_role(tmp_path: Path) -> None:
    def pair(name: str) -> Pair:
        program = Program(name, [], {})
        return Child(program), program

    names = ["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]
    found = [[old.name for old, _ in members] for members in rounds([pair(name) for name in names])]
    assert found == [["prefill-0", "decode-0"], ["prefill-1", "decode-1"], ["decode-2"]]


async def test_all_are_replaced_one_round_after_the_other(pipeline: Pipeline) -> None:
    old = [child.pid for child in pipeline.children]
    await pipeline.rollout.run(pipeline.pairs([child.program for child in pipeline.children]))
    new = [child.pid for child in pipeline.children]
    assert pipeline.left == [f"prefill {old[0]}", f"decode {old[2]}", f"prefill {old[1]}"]
    assert None not in new and not set(old) & set(new)
    assert pipeline.steps == [
        "starting prefill-0, decode-0", "draining the old prefill-0", "draining the old decode-0",
        "starting prefill-1", "draining the old prefill-1",
    ]  # fmt: skip


async def test_a_new_worker_that_cannot_start_changes_nothing(pipeline: Pipeline) -> None:
    old = [child.pid for child in pipeline.children]
    bad = Program("decode-0", [sys.executable, "-c", "raise SystemExit(2)"], dict(os.environ))
    programs = [pipeline.program("prefill-0"), pipeline.program("prefill-1"), bad]
    with pytest.raises(SetupError, match="the new decode-0 cannot start"):
        await pipeline.rollout.run(pipeline.pairs(programs))
    assert [child.pid for child in pipeline.children] == old
    assert not set(old) & {int(line.split()[1]) for line in pipeline.left}, "only the new prefill worker has left"


async def test_workers_that_read_prompts_otherwise_are_refused(pipeline: Pipeline) -> None:
    """The gateway, which goes on, makes token ids for the old ones."""
    old = [child.pid for child in pipeline.children]
    programs = [pipeline.program(child.name, "other") for child in pipeline.children]
    with pytest.raises(SetupError, match="than the gateway"):
        await pipeline.rollout.run(pipeline.pairs(programs))
    assert [child.pid for child in pipeline.children] == old


async def test_who_is_told_to_stop_while_it_is_being_started_does_not_stay(tmp_path: Path) -> None:
    child = Child(Program("w", [sys.executable, "-c", "import signal; signal.pause()"], dict(os.environ)))
    keeping = asyncio.create_task(child.keep())
    await asyncio.sleep(0)  # it spawns
    await child.stop(GRACE_S)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(keeping, GRACE_S)
    assert child.pid is None
