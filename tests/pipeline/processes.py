"""Workers of the tiny model in processes of their own, see `tests.pipeline.lone_worker`."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Process:
    """Loads from the start; `counted` is what its store counted, once it has ended by itself."""

    def __init__(self, popen: "subprocess.Popen[str]") -> None:
        self._popen = popen
        self.counted: dict[str, int] = {}

    def serve(self) -> None:
        """Returns once it takes jobs."""
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._popen.stdin.write("go\n")
        self._popen.stdin.flush()
        assert self._popen.stdout.readline() == "ready\n"

    def end(self) -> None:
        output, _ = self._popen.communicate(timeout=30)
        self.counted = json.loads(output)

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()


@contextmanager
def process(role: str, url: str, folder: Path, *dtypes: str, hash_seed: str | None = None) -> Iterator[Process]:
    """Killed at the end. Start all that a test needs before the first is to serve: they load at the same time."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    if hash_seed is not None:
        env["PYTHONHASHSEED"] = hash_seed
    command = [sys.executable, "-m", "tests.pipeline.lone_worker", role, url, str(folder), *dtypes]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8") as popen:
        try:
            yield Process(popen)
        finally:
            popen.kill()
