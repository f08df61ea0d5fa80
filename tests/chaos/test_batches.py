"""Batches killed in the middle, by each who works on them: every line has one answer, and always the same one."""

import asyncio
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from services.batch.results import stored
from services.bus.connection import Bus
from tests.chaos.load import MODEL
from tests.chaos.up import LOOK_EVERY_S, Up, running_up

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]

NUM_LINES, NUM_LINES_FULL = 40, 1000
MAX_AT_ONCE = 16  # lines that may be stored between two looks at the output


@pytest.fixture
def num_lines(request: pytest.FixtureRequest) -> int:
    return NUM_LINES_FULL if request.config.getoption("--full-chaos") else NUM_LINES


def write_lines(file: Path, number: int) -> dict[str, int]:
    """A file of `number` lines. Their custom ids as the file spells them (JSON), with the number of their group."""
    names = {}
    with file.open("w", encoding="utf-8") as opened:
        for line in range(number):
            name = json.dumps(f'row {line} é🎉 \\ "', ensure_ascii=bool(line % 2))
            text = f"{f'We are group {line % 5}. ' * 10}Say {line}."
            body = {"model": MODEL, "temperature": 0, "max_tokens": 8, "messages": [{"role": "user", "content": text}]}
            request = {"method": "POST", "url": "/v1/chat/completions", "body": body}
            opened.write(f'{{"custom_id": {name}, {json.dumps(request)[1:]}\n')
            names[name] = line % 5
    return names


async def started(up: Up, *arguments: str, log: Path = Path(os.devnull)) -> asyncio.subprocess.Process:
    """What it says on stderr goes to the end of `log`."""
    with log.open("ab") as stderr:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "services.cli.main", "batch", *arguments, "--data", str(up.data_dir),
            stdout=asyncio.subprocess.PIPE, stderr=stderr,
        )  # fmt: skip


def answers(output: Path, names: dict[str, int]) -> dict[str, Any]:
    """What was said to each custom id; fails unless each has one answer, and its id as the file spelled it."""
    found = {}
    for line in output.read_text(encoding="utf-8").split("\n")[:-1]:
        spelled = line.split('"custom_id":', 1)[1].split(',"response"', 1)[0]
        assert spelled in names and spelled not in found, spelled
        found[spelled] = json.loads(line)["response"]["body"]["choices"][0]["message"]["content"]
    assert len(found) == len(names)
    return found


def went_on_at(log: Path) -> list[int]:
    """How many lines each run that was no first one found done."""
    return [int(number) for number in re.findall(r"going on: (\d+) of", log.read_text(encoding="utf-8"))]


async def reached(output: Path, number: int, process: asyncio.subprocess.Process) -> None:
    while not output.exists() or output.read_bytes().count(b"\n") < number:
        assert process.returncode is None, "the batch ended before it could be killed"
        await asyncio.sleep(LOOK_EVERY_S)


async def done_by(bus: Bus, batch: str, number: int) -> None:
    while sum([1 async for _ in stored(bus, "default", batch)]) < number:
        await asyncio.sleep(LOOK_EVERY_S)


async def test_killed_three_times(tmp_path: Path, num_lines: int) -> None:
    """A batch of a client here: the client, a decode worker and the client once more; the same lines in the gateway:
    the gateway, a prefill worker, and who waits for the answers."""
    file, here, there = tmp_path / "in.jsonl", tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    log = tmp_path / "runs.log"
    names = write_lines(file, num_lines)
    async with running_up(tmp_path / "data") as up, await Bus.connect(up.nats, "test") as bus:
        run = ("run", str(file), "-o", str(here), "--nats", up.nats)
        client = await started(up, *run, log=log)
        await reached(here, num_lines // 4, client)
        client.kill()
        await client.wait()
        client = await started(up, *run, log=log)
        await reached(here, num_lines // 2, client)
        await up.replaced("decode-0", up.kill("decode-0"))
        await reached(here, num_lines * 3 // 4, client)
        client.send_signal(signal.SIGINT)
        assert await client.wait() == 130
        num_stopped = here.read_bytes().count(b"\n")
        assert num_stopped < num_lines
        client = await started(up, *run, log=log)
        assert await client.wait() == 0
        said = answers(here, names)
        after_kill, after_interrupt = went_on_at(log)
        assert num_lines // 4 <= after_kill < num_lines // 2 + MAX_AT_ONCE
        assert num_stopped <= after_interrupt < num_lines, "an answer may be stored and not written yet"

        submitting = await started(up, "submit", str(file), "--nats", up.nats)
        batch = (await submitting.communicate())[0].decode().strip()
        assert batch.startswith("batch_")
        waiting = await started(up, "fetch", batch, "-o", str(there), "--wait", "--nats", up.nats)
        await done_by(bus, batch, num_lines // 4)
        await up.replaced("gateway", up.kill("gateway"))
        await done_by(bus, batch, num_lines // 2)
        os.kill(waiting.pid, signal.SIGKILL)
        await waiting.wait()
        await up.replaced("prefill-0", up.kill("prefill-0"))
        waiting = await started(up, "fetch", batch, "-o", str(there), "--wait", "--nats", up.nats)
        assert await waiting.wait() == 0
        assert answers(there, names) == said
        page = json.loads("".join(await up.kvrelay("batch", "status", batch, "--json", "--nats", up.nats)))
        assert page["request_counts"] == {"total": num_lines, "completed": num_lines, "failed": 0}
