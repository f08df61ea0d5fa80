"""One pipeline a data folder, which other commands can find."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.errors import SetupError
from services import config
from services.supervisor import plan, ports, runtime_file
from services.supervisor.runtime_file import RuntimeFile

HERE = RuntimeFile(pid=os.getpid(), http="http://127.0.0.1:1", nats="nats://127.0.0.1:2", pids={"nats": 3})


def test_what_runs_can_be_found_until_it_ends(tmp_path: Path) -> None:
    folder = tmp_path / "日本"
    assert runtime_file.read(folder) is None
    with runtime_file.owned(folder):
        runtime_file.write(folder, HERE)
        assert runtime_file.read(folder) == HERE
    assert runtime_file.read(folder) is None


def test_the_file_of_a_dead_pipeline_is_not_believed(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    runtime_file.write(tmp_path, RuntimeFile(pid=gone.pid, http="h", nats="n", pids={}))
    assert runtime_file.read(tmp_path) is None


def test_half_a_file_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / "up.json").write_text('{"pid": 1', encoding="utf-8")
    assert runtime_file.read(tmp_path) is None


def test_a_second_pipeline_on_the_folder_is_refused_and_the_first_named(tmp_path: Path) -> None:
    with runtime_file.owned(tmp_path):
        runtime_file.write(tmp_path, HERE)
        with pytest.raises(SetupError, match=rf"already \(process {os.getpid()}, http"), runtime_file.owned(tmp_path):
            pass
        assert runtime_file.read(tmp_path) == HERE
    with runtime_file.owned(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match=r"kv\.data_dir = .* cannot be written"), runtime_file.owned(tmp_path / "file"):
        pass


def test_a_taken_port_is_refused_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SetupError, match=rf"api\.port = {port} .*--port 0"):
            ports.settle_port("127.0.0.1", port)
    assert ports.settle_port("127.0.0.1", 0) > 0


def test_children_get_the_real_addresses_their_own_cores_and_ports() -> None:
    asked = config.load(env={}, overrides={"compute.cores": "0-3", "api.port": 0, "api.metrics_port": 9000})
    settings = plan.with_addresses(asked, "nats://here:1", 1234)
    programs = plan.pipeline_programs(settings, 1, 2)
    loaded = {program.name: config.load(env=program.env) for program in programs}
    assert list(loaded) == ["prefill-0", "decode-0", "decode-1", "gateway"]
    assert [loaded[name].compute.cores for name in ("prefill-0", "decode-0", "decode-1")] == ["0,1", "2", "3"]
    assert sorted(child.api.metrics_port for child in loaded.values()) == [9000, 9001, 9002, 9003]
    assert {(child.bus.url, child.api.port) for child in loaded.values()} == {("nats://here:1", 1234)}
    assert not plan.crowded(settings, 4)
    assert plan.crowded(settings, 5)
