"""Idle cores are lent between processes, given back when their owner begins, and survive whoever dies."""

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from ctypes import c_int32
from pathlib import Path
from typing import Any

import pytest

from services.worker import cores as module
from services.worker.cores import LINGER_S, SharedCores, lending_is_possible

pytestmark = pytest.mark.skipif(not lending_is_possible(), reason="no open-file locks on this system")


class Process:
    def __init__(self, path: Path, own: list[int], neighbours: list[int]) -> None:
        command = [sys.executable, "-m", "tests.worker.core_user", str(path), json.dumps(own), json.dumps(neighbours)]
        self.popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8")

    def say(self, words: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(words + "\n")
        self.popen.stdin.flush()

    def heard(self) -> Any:
        assert self.popen.stdout is not None
        return json.loads(self.popen.stdout.readline())

    def ask(self, words: str) -> Any:
        self.say(words)
        return self.heard()

    def one_pass(self) -> list[int]:
        """What was lent to it."""
        lent: list[int] = self.ask("begin")
        self.ask("end")
        return lent

    def kill(self) -> None:
        self.popen.kill()
        self.popen.communicate()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[list[int], list[int]], Process]]:
    with ExitStack() as stack:

        def start(own: list[int], neighbours: list[int]) -> Process:
            process = Process(tmp_path / "run" / "cores", own, neighbours)
            stack.callback(process.kill)
            return process

        yield start


Start = Callable[[list[int], list[int]], Process]


def lent_soon(process: Process, wanted: list[int]) -> None:
    deadline_s = time.monotonic() + 30
    while process.one_pass() != wanted:
        assert time.monotonic() < deadline_s
        time.sleep(LINGER_S / 4)


def test_an_idle_core_is_lent_and_taken_back_at_once(start: Start) -> None:
    owner, borrower = start([0], [1]), start([1, 2], [0])
    assert owner.ask("begin") == [], "nobody has said that core 1 is his"
    assert borrower.ask("begin") == [], "its owner computes"
    assert borrower.ask("end") is None and owner.ask("end") is None
    lent_soon(borrower, [0])
    assert borrower.ask("begin") == [0]
    assert borrower.ask("revoked") is False
    assert owner.ask("begin") == []
    assert borrower.ask("revoked") is True
    borrower.ask("end")
    assert borrower.ask("begin") == []
    assert borrower.ask("revoked") is False, "this pass has nothing to give back"


def test_a_pause_between_two_passes_is_not_idle(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINGER_S", 60.0)
    owner = SharedCores(tmp_path / "run" / "cores", [0], [])
    borrower = start([1], [0])
    owner.begin()
    owner.end()
    assert [borrower.one_pass() for _ in range(5)] == [[]] * 5
    owner.close()
    assert borrower.one_pass() == [0], "it went, and lingers no more"


def test_the_address_is_what_an_owner_writes_to(start: Start, tmp_path: Path) -> None:
    """What C++ polls."""
    owner = start([0], [])
    owner.one_pass()
    borrower = SharedCores(tmp_path / "run" / "cores", [1], [0])
    lease = borrower.begin()
    while not lease.lent:
        borrower.end()
        lease = borrower.begin()
    revoked = c_int32.from_address(lease.revoked)
    assert (lease.own, revoked.value) == (1, 0)
    owner.ask("begin")
    assert revoked.value != 0
    borrower.end()
    borrower.close()


def test_a_killed_owner_is_idle(start: Start) -> None:
    owner, borrower = start([0, 3], []), start([1], [0, 3])
    owner.ask("begin")
    assert borrower.one_pass() == []
    owner.kill()
    assert borrower.one_pass() == [0, 3]
    again = start([0, 3], [])
    again.ask("begin")
    assert borrower.one_pass() == [], "and its successor has its cores"


def test_a_killed_borrower_holds_nothing(start: Start) -> None:
    owner, first, second = start([0], []), start([1], [0]), start([2], [0])
    owner.one_pass()
    lent_soon(first, [0])
    assert first.ask("begin") == [0]
    assert second.one_pass() == [], "a core is lent to one"
    first.kill()
    assert second.ask("begin") == [0]
    owner.ask("begin")
    assert second.ask("revoked") is True


def test_of_two_that_call_a_core_their_own_the_second_neither_lends_nor_borrows(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a rolling restart, until the first has gone."""
    old, new, idle = start([0], [1]), start([0], [1]), start([1], [0])
    old.ask("begin")
    idle.one_pass()
    time.sleep(2 * LINGER_S)
    assert new.one_pass() == []
    assert idle.one_pass() == [], "the end of the second is not the end of the first"
    old.kill()
    time.sleep(module.RETRY_S)
    assert new.ask("begin") == [1]
    assert idle.one_pass() == []


def test_two_borrowers_never_have_a_core_together(start: Start) -> None:
    """An owner who comes and goes, and two that take what they can: 400 passes each."""
    owner = start([0, 1], [])
    owner.one_pass()
    borrowers = [start([2], [0, 1]), start([3], [1, 0])]
    for process in (owner, *borrowers):
        process.say("run 400")
    owner.heard()
    spans = [
        (core, began_ns, ended_ns)
        for borrower in borrowers
        for lent, began_ns, ended_ns in borrower.heard()
        for core in lent
    ]
    for core in (0, 1):
        held = sorted((began_ns, ended_ns) for its, began_ns, ended_ns in spans if its == core)
        assert held, "it was lent"
        assert all(ended_ns <= began_ns for (_, ended_ns), (began_ns, _) in itertools.pairwise(held))
