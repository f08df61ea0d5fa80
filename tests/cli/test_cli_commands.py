"""The command's surface: help, exit codes, settings and the doctor, each in a process of its own."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from services.supervisor import ports


def kvrelay(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVRELAY_")}
    return subprocess.run(
        [sys.executable, "-P", "-m", "services.cli.main", *arguments],
        cwd=cwd,
        env={**clean, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )


COMMANDS = [
    "up",
    "worker",
    "prefill",
    "decode",
    "gateway",
    "workers",
    "drain",
    "restart",
    "generate",
    "chat",
    "job",
    "dead",
]
COMMANDS += ["kv", "model", "config", "doctor", "tune", "bench", "demo"]


def test_help_lists_every_command_with_examples(tmp_path: Path) -> None:
    done = kvrelay("--help", cwd=tmp_path)
    assert done.returncode == 0
    for command in COMMANDS:
        assert f"\n  {command} " in done.stdout
    assert 'kvrelay generate "What is the capital of France?"' in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, tmp_path: Path) -> None:
    done = kvrelay(command, "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage: ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generat"], "No such command"),
        (["generate"], "Missing argument"),
        (["generate", "--temperature", "warm", "hi"], "--temperature"),
        (["generate", "--raw", "--system", "x", "hi"], "--raw leaves out"),
        (["generate", "--logit-bias", "a=1", "hi"], "--logit-bias"),
        (["chat", "--n", "2"], "one answer a turn"),
        (["generate", "hi"], "no pipeline runs on"),
        (["job", "show", "hello-1"], "no pipeline runs on"),
        (["job", "show"], "Missing argument"),
        (["dead", "ls"], "no pipeline runs on"),
        (["dead", "show"], "name a job or --seq N"),
        (["dead", "retry"], "name a job or --seq N, or say --all"),
        (["dead", "drop", "--all", "hello-1"], "--all takes no ID"),
        (["prefill"], "bus.url is empty"),
        (["worker", "--role", "both"], "bus.url is empty"),
        (["worker"], "Missing option '--role'"),
        (["up", "--decode", "0"], "needs a prefill and a decode worker"),
        (["workers"], "no pipeline runs on"),
        (["drain"], "name the workers to drain"),
        (["drain", "--all", "decode-1"], "name the workers to drain"),
        (["drain", "--all", "--nats", "nats://127.0.0.1:1"], "no NATS server answers"),
        (["restart"], "no pipeline runs on"),
        (["config", "check", "--set", "api.prot=1"], "unknown key api.prot"),
        (["config", "check", "--set", "api.port"], "GROUP.KEY=VALUE"),
        (["config", "check", "--config", "none.toml"], "none.toml does not exist"),
        (["bench", "engine", "--batch", "0"], "--batch"),
        (["tune", "--show"], "nothing is kept"),
        (["tune", "--show", "--reset"], "exclude each other"),
        (["bench", "engine", "--peer", "hf", "--peer", "vllm", "--peer-model", "x"], "is not PEER=PATH"),
        (["gateway", "--nats", "nats://127.0.0.1:1", "--port", "70000"], "api.port = 70000"),
    ],
)
def test_wrong_usage_and_settings_exit_2_and_are_named(arguments: list[str], words: str, tmp_path: Path) -> None:
    done = kvrelay(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temperature", "3"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--max-tokens", "0"], "max_tokens"),
        (["--id", "a b"], "id must match"),
        (["--n", "0"], "`n`"),
    ],
)
def test_a_job_out_of_range_is_refused_before_it_is_sent(arguments: list[str], words: str, tmp_path: Path) -> None:
    done = kvrelay("generate", *arguments, "hi", cwd=tmp_path)
    assert done.returncode == 1
    assert "invalid_request" in done.stderr and words.strip("`") in done.stderr


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    done = kvrelay("generate", "a\udcffb", cwd=tmp_path)
    assert done.returncode == 1
    assert "is not UTF-8 text" in done.stderr


def test_settings_are_shown_with_their_sources(tmp_path: Path) -> None:
    (tmp_path / "kvrelay.toml").write_text("[compute]\nmodel = '日本'\n", encoding="utf-8")
    done = kvrelay("config", "show", "--changed", cwd=tmp_path, KVRELAY_API_PORT="81", LC_ALL="C")
    assert done.stdout == (
        '[compute]\nmodel = "日本"  # kvrelay.toml\n\n[api]\nport = 81  # environment KVRELAY_API_PORT\n'
    )


def test_a_right_configuration_is_ok(tmp_path: Path) -> None:
    assert kvrelay("config", "check", cwd=tmp_path).stdout == "ok\n"


def test_a_contradiction_stops_every_command(tmp_path: Path) -> None:
    for command in (["config", "check"], ["up"], ["generate", "hi"]):
        done = kvrelay(*command, cwd=tmp_path, KVRELAY_SCHEDULER_CHUNK_TOKENS="100")
        assert done.returncode == 2
        assert "environment KVRELAY_SCHEDULER_CHUNK_TOKENS" in done.stderr


def test_the_doctor_is_content_here(tmp_path: Path) -> None:
    done = kvrelay("doctor", "--port", str(ports.free_port("127.0.0.1")), cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith("ready: try `kvrelay up`\n")


def test_the_doctor_names_what_is_wrong_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = kvrelay("doctor", "--data", "file", cwd=tmp_path, KVRELAY_KV_BLOCK_TOKENS="17")
    assert done.returncode == 1
    assert "kv.block_tokens = '17'" in done.stdout
    assert "file cannot be written" in done.stdout
    assert "choose another with --data FOLDER" in done.stdout
    assert done.stdout.endswith(" to mend\n")


def test_a_foreign_package_of_our_name_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    done = kvrelay("config", "check", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert f"`kernels` comes from {tmp_path / 'kernels'}" in done.stderr


def test_up_refuses_a_taken_port_before_it_starts_anything(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = kvrelay("up", "--port", port, cwd=tmp_path)
    assert done.returncode == 2
    assert f"api.port = {port}" in done.stderr
    assert not (tmp_path / ".kvrelay" / "nats").exists()
