"""infra/compose/compose.yaml as plain processes: the same commands with the same environment, on loopback."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from services.bus.server import find_binary as find_nats
from services.gateway import key_file
from services.supervisor.ports import free_port
from services.supervisor.valkey import find_binary as find_valkey

INFRA = Path(__file__).parents[2] / "infra"
FILE = INFRA / "compose" / "compose.yaml"
KVRELAY = "kvrelay:cpu"
TIMEOUT_S = 90.0

_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?:(?P<how>:[-?])(?P<word>[^}]*))?\}")


class Service(NamedTuple):
    name: str
    image: str
    command: list[str]
    environment: dict[str, str]
    replicas: int


def services(variables: Mapping[str, str]) -> dict[str, Service]:
    """Of the file, with `variables` put in as compose does. Raises `KeyError` for one that must be there."""
    text = _VARIABLE.sub(lambda found: _value(found, variables), FILE.read_text(encoding="utf-8"))
    found: dict[str, Any] = yaml.safe_load(text)["services"]
    return {
        name: Service(
            name,
            each["image"],
            list(map(str, each.get("command", []))),
            {key: str(value) for key, value in each.get("environment", {}).items()},
            each.get("deploy", {}).get("replicas", 1),
        )
        for name, each in found.items()
    }


def _value(found: re.Match[str], variables: Mapping[str, str]) -> str:
    if found["how"] == ":-":
        return variables.get(found["name"]) or found["word"]
    return variables[found["name"]]


class Process:
    def __init__(self, name: str, command: list[str], env: dict[str, str], folder: Path) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, env=env, cwd=folder, stdout=log, stderr=log)

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def says(self, pattern: str) -> str:
        """Waits for a line of its log; the first group of what was found."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while (found := re.search(pattern, self.log)) is None:
            assert self._process.poll() is None and time.monotonic() < deadline_s, f"{self.name}: {self.log[-3000:]}"
            time.sleep(0.05)
        return found[1]

    def wait(self) -> int:
        """Its exit code."""
        return self._process.wait(TIMEOUT_S)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class Topology:
    """All services that are ours or that we have a server for. `processes` by name, with a number for replicas."""

    def __init__(self, folder: Path, model: str) -> None:
        self.folder = folder
        passwords = {name: f"p{number}-secret" for number, name in enumerate(_passwords())}
        self.services = services({**passwords, "KVRELAY_MODEL": model})
        self.operator_password = passwords["KVRELAY_OPERATOR_PASSWORD"]
        self.valkey_password = passwords["KVRELAY_VALKEY_PASSWORD"]
        self.key = ""
        self.processes: dict[str, Process] = {}
        self.ports = {name: free_port("127.0.0.1") for name in ("nats", "valkey", "monitoring")}
        self.nats_url = f"nats://127.0.0.1:{self.ports['nats']}"

    def start(self, *names: str) -> None:
        """Those services, each as often as it has replicas."""
        for name in names:
            service = self.services[name]
            for number in range(service.replicas):
                own = name if service.replicas == 1 else f"{name}-{number}"
                self.processes[own] = Process(own, self._command(service), self.environment(service), self.folder)

    def make_key(self) -> None:
        self.key = key_file.add(Path(self.environment(self.services["gateway"])["KVRELAY_API_KEYS_FILE"]), "default")

    def environment(self, service: Service) -> dict[str, str]:
        own = {key: self._here(value) for key, value in service.environment.items()}
        own |= {name: "0" for name in ("KVRELAY_API_METRICS_PORT", "KVRELAY_API_PORT") if name in own}
        others = {key: value for key, value in os.environ.items() if not key.startswith("KVRELAY_")}
        return {**others, **own, "KVRELAY_CONFIG": ""}

    def _command(self, service: Service) -> list[str]:
        words = [self._here(word) for word in service.command]
        if service.image == KVRELAY:
            return [sys.executable, "-P", "-m", "services.cli.main", *words]
        if service.image.startswith("nats:"):
            return [str(find_nats()), *words, "--addr", "127.0.0.1", "--port", str(self.ports["nats"])]
        assert words[0] == "valkey-server"
        return [str(find_valkey()), *words[1:], "--port", str(self.ports["valkey"]), "--bind", "127.0.0.1"]

    def _here(self, value: str) -> str:
        for there, here in (
            ("@nats:4222", f"@127.0.0.1:{self.ports['nats']}"),
            ("@valkey:6379", f"@127.0.0.1:{self.ports['valkey']}"),
            ("8222", str(self.ports["monitoring"])),
            ("0.0.0.0", "127.0.0.1"),
            ("/etc/nats", str(INFRA / "nats")),
            ("/data", str(self.folder / "data")),
        ):
            value = value.replace(there, here)
        return value


@contextmanager
def running(folder: Path, model: str) -> Iterator[Topology]:
    """The pipeline of the file, whose workers take jobs soon."""
    topology = Topology(folder, model)
    try:
        topology.start("nats", "valkey", "model")
        assert topology.processes["model"].wait() == 0, topology.processes["model"].log
        topology.make_key()
        topology.start("prefill")
        topology.processes["prefill-0"].says("(self-check)")  # its proof spares the others theirs
        topology.start("decode", "gateway")
        yield topology
    finally:
        for process in topology.processes.values():
            process.kill()


def _passwords() -> list[str]:
    text = (INFRA / "compose" / "env.example").read_text(encoding="utf-8")
    return re.findall(r"^(\w+)=$", text, re.MULTILINE)
