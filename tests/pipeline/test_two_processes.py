"""CASES 25, end to end: what one process stored another one finds, however Python hashes in each."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from schemas.events import Done, Start, Token
from schemas.subjects import Lane
from schemas.wire import encode
from services.bus.connection import Bus
from services.bus.publish import submit_job
from services.bus.reader import follow
from services.bus.streams import ensure_consumers, ensure_streams
from services.models.registry import build_id
from tests.pipeline.tiny import SLUG, tiny_files, tiny_models

PROMPT = list(range(3, 103))  # six full blocks of 16, and four tokens


class Process:
    """A worker; `counted` is what its store counted, once it has ended."""

    def __init__(self, popen: "subprocess.Popen[str]") -> None:
        self._popen = popen
        self.counted: dict[str, int] = {}

    def serve(self) -> None:
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._popen.stdin.write("go\n")
        self._popen.stdin.flush()
        assert self._popen.stdout.readline() == "ready\n"

    def end(self) -> None:
        output, _ = self._popen.communicate(timeout=30)
        self.counted = json.loads(output)


@contextmanager
def worker(role: str, url: str, folder: Path, hash_seed: str | None) -> Iterator[Process]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    if hash_seed is not None:
        env["PYTHONHASHSEED"] = hash_seed
    command = [sys.executable, "-m", "tests.pipeline.lone_worker", role, url, str(folder)]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8") as popen:
        try:
            yield Process(popen)
        finally:
            popen.kill()


async def ask(bus: Bus, name: str) -> tuple[Start, list[int]]:
    job: dict[str, Any] = {
        "id": name, "prompt_token_ids": PROMPT, "max_tokens": 4, "temperature": 0.0, "ignore_eos": True,
    }  # fmt: skip
    await submit_job(bus, "default", SLUG, Lane.INTERACTIVE, encode(job))
    events = [event async for event in follow(bus, "default", name, 30.0)]
    assert isinstance(events[-1], Done)
    return (
        next(event for event in events if isinstance(event, Start)),
        [event.id for event in events if isinstance(event, Token)],
    )


@pytest.mark.parametrize("seeds", [(None, "random", "1")])
async def test_prefill_here_decode_there(broker: str, tmp_path: Path, seeds: tuple[str | None, ...]):
    async with await Bus.connect(broker, "client") as bus:
        await ensure_streams(bus, SLUG)
        await ensure_consumers(bus, SLUG, build_id(tiny_files(), tiny_models()[0].arithmetic.id))
        with ExitStack() as stack:
            decode, first, later = (
                stack.enter_context(worker(role, broker, tmp_path, seed))
                for role, seed in zip(("decode", "prefill", "prefill"), seeds, strict=True)
            )
            for process in (decode, first):
                process.serve()
            cold, ids = await ask(bus, "cold")
            first.end()
            later.serve()
            warm, again = await ask(bus, "warm")
            for process in (later, decode):
                process.end()
    assert (cold.cached_tokens, warm.cached_tokens) == (0, len(PROMPT) - 1)
    assert again == ids
    num_blocks = len(PROMPT) // 16 + 1
    assert (first.counted["hits"], later.counted["hits"]) == (0, num_blocks)
    assert decode.counted["hits"] >= num_blocks and decode.counted["misses"] == 0
