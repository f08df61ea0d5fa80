"""The examples as people would run them, on a real pipeline; each needs its toolchain."""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.chaos.up import Up, running_up

EXAMPLES = Path(__file__).parents[2] / "infra" / "examples"
ANSWER = "The capital of France is Paris."


async def output(*command: str, **env: str) -> str:
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env={**os.environ, **env})
    printed, _ = await process.communicate()
    assert process.returncode == 0
    return printed.decode()


@pytest.fixture
async def up(tmp_path: Path) -> AsyncIterator[Up]:
    async with running_up(tmp_path) as running:
        yield running


@pytest.mark.timeout(240)
async def test_the_examples(up: Up, tmp_path: Path) -> None:
    """One pipeline for all of them: starting it is what takes time."""
    root = str(EXAMPLES.parents[1])
    assert ANSWER in await output(sys.executable, str(EXAMPLES / "client.py"), up.nats, PYTHONPATH=root)
    if shutil.which("curl"):
        answer = json.loads(await output("sh", str(EXAMPLES / "poll.sh"), up.http))
        assert answer["choices"][0]["message"]["content"] == ANSWER
    if go := shutil.which("go"):
        cache = {"GOCACHE": str(tmp_path / "go"), "GOFLAGS": "-mod=mod", "GOTOOLCHAIN": "local"}
        assert await output(go, "run", str(EXAMPLES / "stream.go"), up.http, **cache) == ANSWER + "\n"
