"""Children are started again, stopped, and never outlive their parent."""

import asyncio
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.errors import SetupError
from services.supervisor import child as child_module
from services.supervisor.child import Child, Program

ENDLESS = "import signal; signal.pause()"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"


def program(code: str, *arguments: str) -> Program:
    return Program("worker", [sys.executable, "-c", code, *arguments], dict(os.environ))


class Starts:
    """Counts starts, so that a test can wait for the n-th."""

    def __init__(self) -> None:
        self._starts: asyncio.Queue[None] = asyncio.Queue()

    def __call__(self) -> None:
        self._starts.put_nowait(None)

    async def seen(self, number: int) -> None:
        for _ in range(number):
            await self._starts.get()


async def test_a_killed_child_is_started_again_until_it_is_stopped() -> None:
    starts = Starts()
    child = Child(program(ENDLESS), starts)
    kept = asyncio.create_task(child.keep())
    for _ in range(2):
        await starts.seen(1)
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
    await starts.seen(1)
    assert child.restarts == 2
    await child.stop(10.0)
    await kept
    assert child.pid is None


async def test_a_child_that_cannot_start_is_given_up_by_name() -> None:
    child = Child(program("raise SystemExit(2)"))
    with pytest.raises(SetupError, match="worker cannot be kept running: it exited with 2"):
        await child.keep()
    assert child.restarts == 0


async def test_a_child_that_keeps_crashing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.supervisor.backoff.FIRST_DELAY_S", 0.001)
    child = Child(program("raise SystemExit(7)"))
    with pytest.raises(SetupError, match="exited with 7"):
        await child.keep()
    assert child.restarts == 4


async def test_stopping_does_not_wait_for_the_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.supervisor.backoff.FIRST_DELAY_S", 3600.0)
    monkeypatch.setattr("services.supervisor.backoff.MAX_DELAY_S", 3600.0)
    asleep = asyncio.Event()
    monkeypatch.setattr(child_module._log, "warning", lambda *_, **__: asleep.set())
    child = Child(program("raise SystemExit(7)"))
    kept = asyncio.create_task(child.keep())
    await asleep.wait()
    await child.stop(1.0)
    await kept


async def test_who_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    code = STUBBORN.replace("print('up', flush=True)", f"__import__('os').write({writer}, b'up')")
    # A pipe is passed on by hand, since a child's own output goes to our stderr.
    process = await asyncio.create_subprocess_exec(
        *child_module.tethered(), sys.executable, "-c", code, pass_fds=[writer]
    )
    child = Child(program(code))
    child._process = process
    assert os.read(reader, 2) == b"up"
    await child.stop(0.05)
    assert process.returncode == -signal.SIGKILL
    os.close(reader)
    os.close(writer)


PARENT = """
import asyncio, os, sys
from services.supervisor.child import Program, spawn
async def main():
    child = await spawn(Program("w", [sys.executable, "-c", sys.argv[1]], dict(os.environ)))
    print(child.pid, flush=True)
    await child.wait()
asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the tether is Linux's")
def test_children_die_with_a_parent_that_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, ENDLESS], stdout=subprocess.PIPE, encoding="utf-8")
    assert parent.stdout is not None
    with parent.stdout:
        child = os.pidfd_open(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    gone, _, _ = select.select([child], [], [], 30.0)
    os.close(child)
    assert gone
