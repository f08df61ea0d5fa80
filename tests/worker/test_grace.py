"""No thread that hangs keeps a worker from leaving."""

import subprocess
import sys
import time

import pytest

from services.worker.grace import FINISH_SHARE, HAND_BACK_SHARE, Curfew, Grace

HANGING = "import threading; threading.Thread(target=threading.Event().wait).start()\n"


def run(code: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-c", HANGING + code], capture_output=True, timeout=60, check=False)


def test_a_thread_that_hangs_is_left_at_the_end() -> None:
    done = run("from services.worker.grace import leave_hanging_threads\nprint('over')\nleave_hanging_threads()")
    assert (done.returncode, done.stdout) == (0, b"over\n"), done.stderr


def test_a_process_that_hangs_is_ended_when_its_grace_is_over() -> None:
    code = "from services.worker.grace import Curfew\nc = Curfew(0.0)\nc.begin()\nc.begin()\nthreading.Event().wait()"
    done = run(code)
    assert done.returncode == 0 and b"the grace is over" in done.stderr


def test_who_was_not_told_to_go_may_stay() -> None:
    curfew = Curfew(0.0)
    assert not curfew._timer.is_alive()


def test_the_grace_is_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    grace = Grace(10.0)
    assert (grace.left_s(FINISH_SHARE), grace.left_s(HAND_BACK_SHARE), grace.left_s(1.0)) == (7.0, 9.0, 10.0)
    now = 108.0
    assert (grace.left_s(FINISH_SHARE), grace.left_s(HAND_BACK_SHARE), grace.left_s(1.0)) == (0.0, 1.0, 2.0)
