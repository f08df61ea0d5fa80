"""A real nats-server on the sample configuration, on free ports of loopback."""

import json
import os
import subprocess
import time
from pathlib import Path

from services.bus.server import find_binary, read_info
from services.settings import Bus as BusSettings

SAMPLES = Path(__file__).parents[2] / "infra" / "nats"
USERS = ("operator", "worker", "gateway", "acme", "acme-setup")
READY_TIMEOUT_S = 30.0


class SampleNats:
    """`config` None: the sample as it is. Every user's password is its name and `-pw`."""

    def __init__(self, folder: Path, config: Path = SAMPLES / "nats.conf") -> None:
        self._folder = folder
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0
        for user in USERS:
            (folder / f"{user}.password").write_text(f"{user}-pw\n", encoding="utf-8")

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return (self._folder / "nats.log").read_text(encoding="utf-8", errors="replace")

    def settings(self, user: str) -> BusSettings:
        return BusSettings(user=user, password_file=str(self._folder / f"{user}.password"))

    def start(self) -> "SampleNats":
        data, ports = self._folder / "nats", self._folder / "ports"
        ports.mkdir()
        passwords = {f"KVRELAY_{user.upper().replace('-', '_')}_PASSWORD": f"{user}-pw" for user in USERS}
        command = [str(find_binary()), "--config", str(self._config), "--addr", "127.0.0.1", "--port", "-1"]
        command += ["--ports_file_dir", str(ports)]
        env = {**os.environ, **passwords, "NATS_STORE_DIR": str(data)}
        with (self._folder / "nats.log").open("wb") as log:
            self._process = subprocess.Popen(command, env=env, stderr=log)
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while not self._is_ready(ports):
            assert self._process.poll() is None and time.monotonic() < deadline_s, self.log
            time.sleep(0.02)
        return self

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(10)

    def _is_ready(self, ports: Path) -> bool:
        for file in ports.glob("*.ports"):
            try:
                self.port = int(json.loads(file.read_text(encoding="utf-8"))["nats"][0].rsplit(":", 1)[1])
            except ValueError:
                return False
            return bool((read_info("127.0.0.1", self.port) or {}).get("jetstream"))
        return False
