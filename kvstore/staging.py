"""Temporary files of writers, and the removal of those whose writer is dead.

A writer's files carry its random id; it holds a lock on `<id>.lock` for as long as it lives. Process ids would not do:
containers that share a volume do not share them, and they are used again.
"""

import itertools
import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvstore.filelock import is_same_file, try_lock

_LOCK = ".lock"
_PART = ".part"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


class Staging:
    """The folder `tmp` beside the blobs, on their file system so that a rename is atomic. Thread-safe.

    Its methods raise `OSError`; a folder that cannot be written now may be later: `create` tries again.
    """

    def __init__(self, root: Path) -> None:
        self._folder = root / "tmp"
        self._numbers = itertools.count()
        self._opening = threading.Lock()
        self._id, self._lock = "", -1

    def open(self) -> None:
        """Removes what the dead left behind, then takes an id of its own."""
        with self._opening:
            self._release()
            self._folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self.clean()
            while self._lock < 0:
                name = secrets.token_hex(8)
                lock = os.open(self._folder / (name + _LOCK), os.O_CREAT | os.O_RDWR, 0o600)
                # Between the two calls another process may have taken the file for a dead writer's and removed it.
                if try_lock(lock) and is_same_file(self._folder / (name + _LOCK), lock):
                    self._id, self._lock = name, lock
                else:
                    os.close(lock)

    def create(self) -> tuple[str, int]:
        """Path and descriptor of a new file, which the caller closes and renames or removes."""
        if self._lock >= 0:
            try:
                return self._create()
            except FileNotFoundError:
                pass  # somebody removed the whole folder
        self.open()
        return self._create()

    def close(self) -> None:
        with self._opening:
            self._release()

    def _create(self) -> tuple[str, int]:
        # A forked child shares id and lock, not the counter: the process id keeps the names apart.
        path = f"{self._folder}/{self._id}.{os.getpid()}-{next(self._numbers)}{_PART}"
        return path, os.open(path, _NEW, 0o600)

    def _release(self) -> None:
        if self._lock >= 0:
            with suppress(OSError):
                (self._folder / (self._id + _LOCK)).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1

    def clean(self) -> int:
        """Removes the files of dead writers, and returns how many."""
        removed = 0
        files: dict[str, list[Path]] = {}
        for entry in sorted(self._folder.iterdir(), key=lambda path: path.suffix == _LOCK):
            files.setdefault(entry.name.partition(".")[0], []).append(entry)
        for writer, entries in files.items():
            with self._judged(writer) as is_dead:
                for entry in entries if is_dead else ():
                    removed += entry.suffix == _PART
                    entry.unlink(missing_ok=True)
        return removed

    @contextmanager
    def _judged(self, writer: str) -> Iterator[bool]:
        """Whether a writer is dead. Its lock is held meanwhile: who has made the file, and not locked it yet, must find
        that it was taken, and not lose what he writes later."""
        try:
            lock = os.open(self._folder / (writer + _LOCK), os.O_RDWR)
        except FileNotFoundError:
            yield True
            return
        except OSError:
            yield False  # another user's: not ours to judge
            return
        try:
            yield try_lock(lock)
        finally:
            os.close(lock)
