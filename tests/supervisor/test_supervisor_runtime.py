"""One pipeline a data folder, which other commands can find."""

import os
import signal
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


CREW = plan.Crew(prefill=1, decode=2)


def test_a_taken_port_is_refused_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SetupError, match=rf"api\.port = {port} .*--port 0"):
            ports.settle_port("127.0.0.1", port)
    assert ports.settle_port("127.0.0.1", 0) > 0


def test_children_get_the_real_addresses_their_own_cores_and_ports() -> None:
    asked = config.load(env={}, overrides={"compute.cores": "0-3", "api.port": 0, "api.metrics_port": 9000})
    settings = plan.with_addresses(asked, "nats://here:1", 1234)
    programs = plan.pipeline_programs(settings, CREW)
    loaded = {program.name: config.load(env=program.env) for program in programs}
    assert list(loaded) == ["prefill-0", "decode-0", "decode-1", "gateway"]
    assert [loaded[name].compute.cores for name in ("prefill-0", "decode-0", "decode-1")] == ["0,1", "2", "3"]
    assert sorted(child.api.metrics_port for child in loaded.values()) == [9000, 9001, 9002, 9003]
    assert {(child.bus.url, child.api.port) for child in loaded.values()} == {("nats://here:1", 1234)}
    assert not plan.crowded(settings, 4)
    assert plan.crowded(settings, 5)


def test_a_crew_of_one_does_both_on_all_cores() -> None:
    settings = config.load(env={}, overrides={"compute.cores": "0-3"})
    (program,) = plan.worker_programs(settings, plan.Crew(0, 0, 1))
    assert (program.name, program.argv[-3:]) == ("both-0", ["worker", "--role", "both"])
    assert config.load(env=program.env).compute.cores == "0,1,2,3"


def test_workers_that_replace_others_have_ports_of_their_own() -> None:
    asked = config.load(env={}, overrides={"compute.cores": "0-3", "api.metrics_port": 9000})
    settings = plan.with_addresses(asked, "nats://here:1", 1234)
    first = plan.worker_programs(settings, CREW)
    mixed = [*plan.worker_programs(settings, CREW, beside=first)[:2], first[2]]  # a rollout that was given up
    ports = [[config.load(env=program.env).api.metrics_port for program in programs] for programs in (first, mixed)]
    assert ports == [[9001, 9002, 9003], [9004, 9005, 9003]]
    third = plan.worker_programs(settings, CREW, rolling=True, beside=mixed)
    assert [config.load(env=program.env).api.metrics_port for program in third] == [9001, 9002, 9006]
    assert all(program.argv[-1] == "--rolling" for program in third)
    assert not any("--rolling" in program.argv for program in first)


def test_only_what_concerns_workers_alone_may_change_under_a_running_pipeline() -> None:
    old = config.load(env={}, overrides={"api.port": 0})
    new = config.load(env={}, overrides={"api.port": 0, "compute.dtype": "float32", "scheduler.grace_s": 1.0})
    assert plan.reloaded(old, new) is new
    for name, value in (("api.port", 81), ("bus.tenant", "t"), ("kv.data_dir", "x"), ("compute.model", "y")):
        with pytest.raises(SetupError, match=rf"{name} changed"):
            plan.reloaded(old, config.load(env={}, overrides={"api.port": 0, name: value}))


def test_a_change_of_build_is_allowed_for_the_rollout_that_was_asked_for(tmp_path: Path) -> None:
    rung = []
    before = signal.signal(signal.SIGHUP, lambda *_: rung.append(1))
    try:
        for rolling in (True, False):
            runtime_file.ask_for_rollout(tmp_path, HERE, rolling=rolling)
            assert runtime_file.may_change_build(tmp_path) is rolling
            assert runtime_file.may_change_build(tmp_path) is False
        runtime_file.ask_for_rollout(tmp_path, HERE, rolling=True)
        runtime_file.ask_for_rollout(tmp_path, HERE, rolling=False)
        assert runtime_file.may_change_build(tmp_path) is False, "the later word counts"
    finally:
        signal.signal(signal.SIGHUP, before)
    assert len(rung) == 4
