"""`kvrelay up` with the real model: it gets ready, answers, survives kills, and stops in order."""

import ast
import json
import os
import select
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.supervisor import runtime_file
from tests.models.default_model import default_model

pytestmark = pytest.mark.timeout(300)  # a worker's start takes 5 s, and much longer beside other work

KVRELAY = [sys.executable, "-P", "-m", "services.cli.main"]
FRANCE = "What is the capital of France?"
ANSWER = "The capital of France is Paris.\n"
STOP_TIMEOUT_S = 30.0


class Up:
    """A running `kvrelay up`; `data_dir` has the converted model in it."""

    def __init__(self, data_dir: Path, *arguments: str) -> None:
        self.data_dir = data_dir
        small = ["--set", "scheduler.max_sequences=2", "--set", "api.log_level=warning"]
        command = [*KVRELAY, "up", "--port", "0", "--data", str(data_dir), *small, *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8")
        assert self.process.stdout is not None
        self.ready = self.process.stdout.readline().split()

    @property
    def running(self) -> runtime_file.RuntimeFile:
        found = runtime_file.read(self.data_dir)
        assert found is not None
        return found

    def command(self, *arguments: str) -> list[str]:
        return [*KVRELAY, "generate", "--data", str(self.data_dir), *arguments]

    def generate(self, *arguments: str, exit_code: int = 0) -> str:
        done = subprocess.run(self.command(*arguments), stdout=subprocess.PIPE, encoding="utf-8", check=False)
        assert done.returncode == exit_code
        return done.stdout


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with started(tmp_path_factory.mktemp("up")) as running:
        yield running


@contextmanager
def started(data_dir: Path, *arguments: str) -> Iterator[Up]:
    (data_dir / "models").symlink_to(default_model().path.parent)
    running = Up(data_dir, *arguments)
    try:
        yield running
    finally:
        running.process.kill()
        with running.process:
            running.process.wait()


def test_it_says_where_it_is_once_it_is_ready(up: Up) -> None:
    word, http_url, nats_url = up.ready
    assert word == "ready"
    assert (up.running.http, up.running.nats) == (http_url, nats_url)
    assert set(up.running.pids) == {"nats", "prefill-0", "decode-0", "gateway"}
    with urllib.request.urlopen(f"{http_url}/ready") as answer:
        assert json.load(answer)["state"] == "ok"


def test_one_worker_may_do_both(tmp_path: Path) -> None:
    with started(tmp_path, "--both", "1") as up:
        assert set(up.running.pids) == {"nats", "both-0", "gateway"}
        assert up.generate(FRANCE) == ANSWER
        with urllib.request.urlopen(f"{up.ready[1]}/ready") as answer:
            assert json.load(answer)["state"] == "ok"


def test_a_job_is_answered_and_told_as_events(up: Up) -> None:
    assert up.generate(FRANCE) == ANSWER
    events = [json.loads(line) for line in up.generate("--json", FRANCE).splitlines()]
    assert [events[0]["type"], events[-1]["type"]] == ["start", "done"]
    assert "".join(event.get("text", "") for event in events) == ANSWER.strip()


def test_the_same_job_again_is_the_same_stream_and_another_is_refused(up: Up) -> None:
    first = up.generate("--json", "--id", "again", FRANCE)
    assert up.generate("--json", "--id", "again", FRANCE) == first
    assert up.generate("--json", "--id", "again", "Something else", exit_code=1) == ""


def test_what_became_of_a_job_is_told_by_command_and_over_http(up: Up) -> None:
    up.generate("--id", "told", FRANCE)
    command = [*KVRELAY, "job", "show", "--json", "--data", str(up.data_dir), "told"]
    told = json.loads(subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", check=True).stdout)
    with urllib.request.urlopen(f"{up.running.http}/v1/requests/told") as answer:
        assert json.load(answer) == told
    assert (told["state"], told["choices"][0]["tokens"]) == ("done", 8)
    assert [delivery["worker"].split("-")[0] for delivery in told["deliveries"]] == ["prefill", "decode"]


def test_the_client_of_the_readme_works(up: Up) -> None:
    page = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    code = page.partition("```python\n")[2].partition("```")[0]
    assert "nats://127.0.0.1:4222" in code
    command = [sys.executable, "-c", code.replace("nats://127.0.0.1:4222", up.running.nats)]
    printed = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", check=True).stdout
    events = [ast.literal_eval(line) for line in printed.splitlines()]
    assert events[-1]["type"] == "done"
    text = "".join(event.get("text", "") for event in events)
    assert text.startswith("DEFGHIJKLMNOPQRSTUVWXYZ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_leaving_cancels_only_when_asked_to(up: Up, number: signal.Signals) -> None:
    job = [f"--id=left-{number.name}", "--ignore-eos", "--max-tokens=4000", "Count."]
    with subprocess.Popen(up.command("--cancel-on-exit", *job), stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        reader.stdout.read(1)
        reader.send_signal(number)
        reader.stdout.read()
        assert reader.wait() == 130
    events = [json.loads(line) for line in up.generate("--json", *job, exit_code=1).splitlines()]
    assert (events[-1]["type"], events[-1]["code"]) == ("error", "cancelled")


@pytest.mark.slow
def test_it_survives_kills(up: Up) -> None:
    where = (up.running.http, up.running.nats)
    for name in ("decode-0", "prefill-0", "nats"):
        killed = up.running.pids[name]
        os.kill(killed, signal.SIGKILL)
        assert up.generate(FRANCE) == ANSWER  # waits in the queue until who answers is back
        assert up.running.pids[name] != killed
    assert (up.running.http, up.running.nats) == where


def test_it_stops_in_order_and_leaves_nobody(up: Up) -> None:
    children = [os.pidfd_open(pid) for pid in up.running.pids.values()]
    up.process.terminate()
    assert up.process.wait(STOP_TIMEOUT_S) == 0
    assert all(select.select([child], [], [], 0)[0] for child in children)
    for child in children:
        os.close(child)
    assert runtime_file.read(up.data_dir) is None
