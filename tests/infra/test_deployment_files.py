"""What the Dockerfile and the systemd units say, held against the checkout and the command line."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import click
import pytest

from services.cli.main import cli

ROOT = Path(__file__).parents[2]
UNITS = ROOT / "infra" / "systemd"
DOCKERFILE = (ROOT / "infra" / "Dockerfile").read_text(encoding="utf-8")


def parsed(words: list[str]) -> None:
    """Fails for a command or an option that kvrelay does not have."""
    name, *arguments = words
    with click.Context(cli) as context:
        command = cli.get_command(context, name)
        assert command is not None, name
        command.make_context(name, arguments).close()


def value(unit: str, key: str) -> str:
    (found,) = re.findall(rf"^{key}=(.*)$", (UNITS / unit).read_text(encoding="utf-8"), re.MULTILINE)
    return str(found)


def test_the_gateway_unit_runs_a_command_that_there_is() -> None:
    binary, *words = value("kvrelay-gateway.service", "ExecStart").split()
    assert binary == "/opt/kvrelay/bin/kvrelay"
    parsed(words)


@pytest.mark.parametrize("instance", ["prefill-1", "decode-12", "both-1"])
def test_the_worker_unit_takes_the_role_from_its_name(instance: str, tmp_path: Path) -> None:
    line = value("kvrelay-worker@.service", "ExecStart")
    script = re.fullmatch(r"/bin/sh -c '(.*)' sh %i", line)
    assert script is not None
    shown = tmp_path / "kvrelay"
    shown.write_text('#!/bin/sh\necho "$@"\n', encoding="utf-8")
    shown.chmod(0o755)
    asked = script[1].replace("$$", "$").replace("%%", "%").replace("/opt/kvrelay/bin/kvrelay", str(shown))
    done = subprocess.run(["/bin/sh", "-c", asked, "sh", instance], check=True, capture_output=True, encoding="utf-8")
    assert done.stdout.split() == ["worker", "--role", instance.partition("-")[0]]
    parsed(done.stdout.split())


@pytest.mark.parametrize("unit", ["kvrelay-gateway.service", "kvrelay-worker@prefill-1.service", "nats.service"])
def test_systemd_understands_the_units(unit: str, tmp_path: Path) -> None:
    """Where there is a systemd to ask; elsewhere at least each line is a section, a comment or an assignment."""
    source = UNITS / re.sub(r"@.*\.", "@.", unit)
    for line in source.read_text(encoding="utf-8").splitlines():
        assert re.fullmatch(r"|#.*|\[\w+\]|\w+=.*", line), line
    if shutil.which("systemd-analyze") is None:
        return
    shutil.copy(source, tmp_path / unit)
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / unit)], check=False, capture_output=True, encoding="utf-8"
    )
    complaints = [line for line in done.stderr.splitlines() if unit in line and "is not executable" not in line]
    assert complaints == []


def test_workers_have_longer_to_stop_than_their_grace() -> None:
    from services.settings import Scheduler

    for unit in ("kvrelay-gateway.service", "kvrelay-worker@.service"):
        assert int(value(unit, "TimeoutStopSec")) > Scheduler().grace_s


def test_the_image_copies_what_is_there_and_installs_what_was_tested() -> None:
    for line in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE):
        assert all((ROOT / source).exists() for source in line.split()), line
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (version,) = set(re.findall(r"^FROM python:([\d.]+)-slim", DOCKERFILE, re.MULTILINE))
    assert f">={version}" == project["requires-python"]
    (torch,) = re.findall(r'^ARG TORCH="(.*)"$', DOCKERFILE, re.MULTILINE)
    assert torch in (ROOT / "Makefile").read_text(encoding="utf-8")
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert not {"schemas", "kernels", "kvstore", "services", "constraints.txt"} & set(ignored)
    assert re.search(r'^ENTRYPOINT \["kvrelay"\]$', DOCKERFILE, re.MULTILINE)
