"""`kvrelay up` with the real model: it gets ready, survives kills, and stops in order."""

import ast
import json
import os
import select
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.supervisor import runtime_file
from tests.models.default_model import default_model

KVRELAY = [sys.executable, "-P", "-m", "services.cli.main"]
ANSWER = "The capital of France is Paris.\n"
STOP_TIMEOUT_S = 30.0


def readme_client(nats_url: str) -> str:
    """The text that the README's ten lines of Python get from this pipeline."""
    page = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    code = page.partition("```python\n")[2].partition("```")[0]
    assert "nats://127.0.0.1:4222" in code
    command = [sys.executable, "-c", code.replace("nats://127.0.0.1:4222", nats_url)]
    printed = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", check=True).stdout
    events = [ast.literal_eval(line) for line in printed.splitlines()]
    assert events[-1]["type"] == "done"
    return "".join(event["text"] for event in events if event["type"] in ("token", "finish")).split("\n")[0]


class Up:
    """A running `kvrelay up`; `data_dir` has the converted model in it."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        small = ["--set", "scheduler.max_sequences=2", "--set", "api.log_level=warning"]
        command = [*KVRELAY, "up", "--port", "0", "--data", str(data_dir), *small]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8")
        assert self.process.stdout is not None
        self.ready = self.process.stdout.readline().split()

    def pids(self) -> dict[str, int]:
        running = runtime_file.read(self.data_dir)
        assert running is not None
        return running.pids

    def generate(self) -> str:
        command = [*KVRELAY, "generate", "--data", str(self.data_dir), "What is the capital of France?"]
        return subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", check=True).stdout

    def stop(self) -> int:
        self.process.terminate()
        with self.process:
            return self.process.wait(STOP_TIMEOUT_S)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    models = default_model().path.parent
    (tmp_path / "models").symlink_to(models)
    running = Up(tmp_path)
    yield running
    running.process.kill()
    with running.process:
        running.process.wait()


@pytest.mark.timeout(300)  # five starts of a worker; 30 s on a machine that does nothing else
def test_a_pipeline_gets_ready_survives_kills_and_stops_in_order(up: Up) -> None:
    word, http_url, nats_url = up.ready
    assert word == "ready"
    with urllib.request.urlopen(f"{http_url}/ready") as answer:
        assert json.load(answer)["state"] == "ok"
    before = up.pids()
    assert set(before) == {"nats", "prefill-0", "decode-0", "gateway"}
    assert up.generate() == ANSWER
    assert readme_client(nats_url) == "DEFGHIJKLMNOPQRSTUVWXYZ"
    for name in ("decode-0", "prefill-0", "nats"):
        os.kill(up.pids()[name], signal.SIGKILL)
        assert up.generate() == ANSWER  # waits in the queue until who answers is back
        assert up.pids()[name] != before[name]
    running = runtime_file.read(up.data_dir)
    assert running is not None and (running.http, running.nats) == (http_url, nats_url)
    children = [os.pidfd_open(pid) for pid in up.pids().values()]
    assert up.stop() == 0
    assert all(select.select([child], [], [], 0)[0] for child in children)
    for child in children:
        os.close(child)
    assert runtime_file.read(up.data_dir) is None


BROKER = """
import asyncio, sys
from services import config
from services.supervisor.broker import Broker
async def main():
    broker = Broker(config.load(env={}, overrides={"kv.data_dir": sys.argv[1]}), lambda: None)
    broker.start()
    print(broker.pid, flush=True)
    await broker.keep()
asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the tether is Linux's")
def test_the_broker_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", BROKER, str(tmp_path)], stdout=subprocess.PIPE, encoding="utf-8")
    assert parent.stdout is not None
    with parent.stdout:
        broker = os.pidfd_open(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    gone, _, _ = select.select([broker], [], [], 30.0)
    os.close(broker)
    assert gone
