"""Cores that workers of one host lend each other: who computes has his own, and those that their owners leave idle.

A small file that all map, one slot a core. An owner says in his slots until when he counts as busy; a borrower takes a
lock on a slot, so that two never take the same core, and says in it who he is; an owner who begins tells him to stop.
Locks go with their holder, however that ends: a dead owner's cores are idle, a dead borrower has none. What a race may
cost is a part of a pass in which two share a core. Bits do not depend on threads, so nothing depends on this file.
"""

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import socket
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from services.engine.lease import Lease

log = logging.getLogger(__name__)

MAX_CORES = 1024
LINGER_S = 0.02  # who paused for so long is idle: the moment between two steps is no pause
RETRY_S = 1.0

_SLOT_WORDS = 8  # of 8 bytes: a cache line a core
_BUSY_UNTIL, _BORROWER, _REVOKED, _KNOWN = range(4)
_BORROW_LOCKS = MAX_CORES  # the lock of an owner is byte `core`, that of a borrower byte `_BORROW_LOCKS + core`
_ALWAYS = 2**62
_FLOCK = "hhqqi4x"  # struct flock on 64-bit Linux


def lending_is_possible() -> bool:
    return sys.platform == "linux" and hasattr(fcntl, "F_OFD_SETLK") and struct.calcsize("P") == 8


def map_path(data_dir: str | Path) -> Path:
    """Of this host, should the folder be shared."""
    return Path(data_dir) / "run" / f"cores-{socket.gethostname()}"


class SharedCores:
    """One worker's view of the map. Belongs to the thread that computes; closed by its maker.

    `own` are its cores, `neighbours` those of others that it would use. Raises `OSError` if the file cannot be made.
    """

    def __init__(self, path: Path, own: Sequence[int], neighbours: Sequence[int]) -> None:
        self._own = [core for core in own if core < MAX_CORES]
        self._neighbours = [core for core in neighbours if core not in own and core < MAX_CORES]
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._words: memoryview | None = None
        try:
            os.ftruncate(self._fd, MAX_CORES * _SLOT_WORDS * 8)  # a file that has this size stays as it is
            self._map = mmap.mmap(self._fd, MAX_CORES * _SLOT_WORDS * 8)
        except OSError:
            os.close(self._fd)
            raise
        self._words = memoryview(self._map).cast("q")
        self._home = self._own[0]
        anchor = ctypes.c_char.from_buffer(self._map, self._at(self._home, _REVOKED) * 8)
        self._revoked_at = ctypes.addressof(anchor)
        del anchor  # a mapping that is pointed to cannot be closed
        self._is_owner = False
        self._next_try_s = 0.0
        self._borrowed: list[int] = []

    def begin(self) -> Lease:
        """Takes the own cores back, and those of neighbours that are idle now."""
        words = self._words
        assert words is not None and not self._borrowed
        if not self._is_owner and time.monotonic() >= self._next_try_s:
            self._next_try_s = time.monotonic() + RETRY_S
            self._is_owner = self._take_ownership()
        words[self._at(self._home, _REVOKED)] = 0
        if self._is_owner:
            for core in self._own:
                words[self._at(core, _BUSY_UNTIL)] = _ALWAYS
            for core in self._own:
                borrower = words[self._at(core, _BORROWER)] - 1
                if 0 <= borrower < MAX_CORES and borrower != self._home:
                    words[self._at(borrower, _REVOKED)] = 1
            self._borrowed = [core for core in self._neighbours if self._borrow(core)]
        return Lease(own=len(self._own), lent=len(self._borrowed), revoked=self._revoked_at)

    def end(self) -> None:
        """Gives back what was lent. The own cores count as idle if nothing begins for `LINGER_S`."""
        words = self._words
        assert words is not None
        for core in self._borrowed:
            self._give_back(core)
        self._borrowed = []
        if self._is_owner:
            idle_from = time.monotonic_ns() + int(LINGER_S * 1e9)
            for core in self._own:
                words[self._at(core, _BUSY_UNTIL)] = idle_from

    def is_revoked(self) -> bool:
        """Whether an owner wants a core back that was lent to this pass."""
        words = self._words
        assert words is not None
        return bool(words[self._at(self._home, _REVOKED)])

    def close(self) -> None:
        if self._words is None:
            return
        if self._borrowed:
            self.end()
        self._words.release()
        self._words = None
        self._map.close()
        os.close(self._fd)  # and with it all locks

    def _take_ownership(self) -> bool:
        """All own cores or none: what two workers call their own is lent by neither."""
        words = self._words
        assert words is not None
        for number, core in enumerate(self._own):
            if not self._lock(core):
                for taken in self._own[:number]:
                    self._unlock(taken)
                return False
        for core in self._own:
            words[self._at(core, _KNOWN)] = 1
        return True

    def _borrow(self, core: int) -> bool:
        words = self._words
        assert words is not None
        if not words[self._at(core, _KNOWN)] or self._is_busy(core) or not self._lock(_BORROW_LOCKS + core):
            return False
        words[self._at(core, _BORROWER)] = self._home + 1
        if self._is_busy(core):  # the owner began in between, and may not have seen us
            self._give_back(core)
            return False
        return True

    def _give_back(self, core: int) -> None:
        words = self._words
        assert words is not None
        words[self._at(core, _BORROWER)] = 0
        self._unlock(_BORROW_LOCKS + core)

    def _is_busy(self, core: int) -> bool:
        words = self._words
        assert words is not None
        return time.monotonic_ns() < words[self._at(core, _BUSY_UNTIL)] and self._is_locked(core)

    @staticmethod
    def _at(core: int, word: int) -> int:
        return core * _SLOT_WORDS + word

    def _lock(self, byte: int) -> bool:
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK, byte))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def _unlock(self, byte: int) -> None:
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, byte))

    def _is_locked(self, byte: int) -> bool:
        """By another than this one."""
        found = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, byte))
        return bool(struct.unpack(_FLOCK, found)[0] != fcntl.F_UNLCK)


def _flock(kind: int, byte: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, byte, 1, 0)


def share_cores(data_dir: str | Path, own: Sequence[int], neighbours: Sequence[int]) -> SharedCores | None:
    """None where cores cannot be lent."""
    if not own or not lending_is_possible():
        return None
    try:
        return SharedCores(map_path(data_dir), own, neighbours)
    except OSError as error:
        log.warning("no cores are lent or borrowed: %s", error)
        return None
