"""Locks on open files (flock): they go with the process that holds them, however it dies."""

import errno
import fcntl
import os
import time

WAIT_S = 1.0  # locks are held for microseconds; one that is held for longer belongs to a process that was frozen
_POLL_S = 0.0002


def try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock(fd: int, wait_s: float = WAIT_S) -> None:
    """Raises `TimeoutError` (an `OSError`) when somebody else holds it for longer."""
    deadline_s = time.monotonic() + wait_s
    while not try_lock(fd):
        if time.monotonic() >= deadline_s:
            raise TimeoutError(errno.ETIMEDOUT, "another process holds the lock")
        time.sleep(_POLL_S)


def unlock(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_UN)


def is_same_file(path: str | os.PathLike[str], fd: int) -> bool:
    """Whether `path` still names the file that `fd` has open."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False
