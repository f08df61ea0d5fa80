"""A server of somebody else's that runs as our child: started by its owner, ended here, its log in a file."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from schemas.errors import SetupError

_TAIL_CHARS = 2000


class ServerProcess:
    """What embedded servers have in common. All methods block."""

    def __init__(self, name: str, log_path: Path, wrapper: Sequence[str], stop_timeout_s: float) -> None:
        """`wrapper` is put before the server's command line; it must become the server, by exec."""
        self.log_path = log_path
        self._name = name
        self._wrapper = list(wrapper)
        self._stop_timeout_s = stop_timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait(self) -> int | None:
        """Until the process has ended; its exit code, negative for a signal. None, at once, if there is none."""
        return self._process.wait() if self._process is not None else None

    def stop(self) -> None:
        """Ends the server, with SIGKILL if it does not go in time."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(self._stop_timeout_s)
            except subprocess.TimeoutExpired:
                self.kill()
            self._process = None

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _run(self, command: Sequence[str], inherited: Sequence[int] = ()) -> None:
        """Starts `command`, which inherits the given file descriptors."""
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._wrapper, *command],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                pass_fds=inherited,
                start_new_session=True,  # Ctrl-C stops the workers first, then the supervisor stops us
            )

    def _not_ready(self) -> SetupError:
        tail = self.log_path.read_text(encoding="utf-8", errors="replace")[-_TAIL_CHARS:]
        return SetupError(f"{self._name} did not become ready; the end of {self.log_path}:\n{tail}")
