"""`<data_dir>/up.json`: where the pipeline that runs on a data folder can be reached, for commands that ask it."""

import contextlib
import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec

from schemas.errors import SetupError

_ROLLING = "rolling"  # a file beside it, while a change of build is asked for


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """The last rolling restart, the `number`-th since the start. `error`: why it was given up."""

    number: int = 0
    is_running: bool = False
    step: str = ""
    error: str = ""


class RuntimeFile(msgspec.Struct, frozen=True, kw_only=True):
    """`pids` are by child name, as of the last (re)start; `pid` is the supervisor's."""

    pid: int
    http: str
    nats: str
    pids: dict[str, int]
    rollout: Rollout = Rollout()


def _path(data_dir: str | Path) -> Path:
    return Path(data_dir) / "up.json"


def write(data_dir: str | Path, runtime: RuntimeFile) -> None:
    """Replaces the file in one step, so that a reader never sees half of it."""
    beside = _path(data_dir).with_suffix(".tmp")
    beside.write_bytes(msgspec.json.format(msgspec.json.encode(runtime)))
    beside.replace(_path(data_dir))


def read(data_dir: str | Path) -> RuntimeFile | None:
    """The pipeline that runs on `data_dir`, None if there is none (any more)."""
    try:
        found = msgspec.json.decode(_path(data_dir).read_bytes(), type=RuntimeFile)
        os.kill(found.pid, 0)
    except (FileNotFoundError, NotADirectoryError, ProcessLookupError, msgspec.DecodeError):
        return None
    except PermissionError:  # it runs, as somebody else
        pass
    return found


def ask_for_rollout(data_dir: str | Path, running: RuntimeFile, *, rolling: bool) -> None:
    """Tells the supervisor to replace its workers; `rolling`: also by another build."""
    request = Path(data_dir) / _ROLLING
    if rolling:
        request.touch()
    else:
        request.unlink(missing_ok=True)
    os.kill(running.pid, signal.SIGHUP)


def may_change_build(data_dir: str | Path) -> bool:
    """Whether the rollout that was asked for may; asked once a request."""
    request = Path(data_dir) / _ROLLING
    asked = request.exists()
    request.unlink(missing_ok=True)
    return asked


def remove(data_dir: str | Path) -> None:
    _path(data_dir).unlink(missing_ok=True)


@contextlib.contextmanager
def owned(data_dir: str | Path) -> Iterator[None]:
    """Holds the data folder for one supervisor. Raises `SetupError` if it is held or cannot be written.

    The lock goes with its process, however that ends.
    """
    try:
        Path(data_dir).mkdir(parents=True, exist_ok=True)
        lock = open(Path(data_dir) / "up.lock", "w", encoding="utf-8")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise SetupError(f"kv.data_dir = {str(data_dir)!r} cannot be written: {error}", param="kv.data_dir") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SetupError(
                f"a pipeline runs on {data_dir} already ({_whose(data_dir)}): stop it, or give --data another folder",
                param="kv.data_dir",
            ) from None
        try:
            yield
        finally:
            remove(data_dir)


def _whose(data_dir: str | Path) -> str:
    running = read(data_dir)
    return f"process {running.pid}, {running.http}" if running else "it is starting"
