"""Put under the workers and the gateway by PYTHONPATH: an operating system that goes wrong when the driver says so.

Python imports this before anything else, so that the product has no hook for it and notices nothing: the wall clock
is off, calls into the folder of KV blocks hang, or find the disk full. On SIGUSR1 it reports what a process holds.
"""

import asyncio
import contextlib
import errno
import gc
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

from faultpage import ROLES, FaultPage, Faults  # its folder is on the path as well

_LOOK_AGAIN_S = 0.02
_BY_PATH = ("open", "stat", "utime", "rename", "unlink", "mkdir", "listdir", "scandir")
_BY_DESCRIPTOR = ("readv", "writev")  # nothing but the tier of block files uses them

_sleep, _monotonic, _time, _time_ns = time.sleep, time.monotonic, time.time, time.time_ns


def install(page: FaultPage, role: str, kv_folder: str, report_file: str) -> None:
    _install_clock(page, ROLES.index(role))
    for name in _BY_PATH:
        setattr(os, name, _waiting_for_store(getattr(os, name), page, f"{kv_folder}/"))
    for name in _BY_DESCRIPTOR:
        setattr(os, name, _waiting_for_store(getattr(os, name), page, ""))
    os.writev = _out_of_space(os.writev, page)
    signal.signal(signal.SIGUSR1, lambda number, frame: _report(report_file, frame))


def _install_clock(page: FaultPage, role: int) -> None:
    pid = os.getpid()

    def offset_s() -> float:
        faults = page.read()
        return faults.clock_offset_s if pid == faults.clock_pid or role == faults.clock_role else 0.0

    time.time = lambda: _time() + offset_s()
    time.time_ns = lambda: _time_ns() + int(offset_s() * 1e9)


def _waiting_for_store(call: Callable[..., Any], page: FaultPage, folder: str) -> Callable[..., Any]:
    """`call`, which does not return while the store is frozen; `folder`: only for paths in it."""

    def called(target: Any, *arguments: Any, **named: Any) -> Any:
        if not folder or (isinstance(target, (str, os.PathLike)) and f"{os.fspath(target)}/".startswith(folder)):
            while _monotonic() < page.read().frozen_until_s:
                _sleep(_LOOK_AGAIN_S)
        return call(target, *arguments, **named)

    return called


def _out_of_space(writev: Callable[..., int], page: FaultPage) -> Callable[..., int]:
    """As a full disk does it: some bytes still fit, then none."""

    def called(fd: int, buffers: Any) -> int:
        if _monotonic() >= page.read().full_until_s:
            return writev(fd, buffers)
        if os.fstat(fd).st_size == 0 and len(buffers[0]) > 1:
            return writev(fd, [buffers[0][: len(buffers[0]) // 2]])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return called


def _report(file: str, frame: FrameType | None) -> None:
    """Runs between two steps of the event loop's thread."""
    tasks: Counter[str] = Counter()
    with contextlib.suppress(RuntimeError):  # no loop yet
        tasks.update(task.get_coro().__qualname__ for task in asyncio.all_tasks())
    held = {}
    for found in gc.get_objects():
        match type(found).__qualname__:
            case "PagePool":
                held["pages"] = found.num_held
                held["pages promised"] = found.num_pages - found.num_unreserved
            case "ReplyHub":
                held["reply writers"] = found.num_writers
            case "Exchange":
                held["open HTTP jobs"] = len(found.jobs)
    beside = f"{file}.tmp"
    with open(beside, "w", encoding="utf-8") as out:
        json.dump({"tasks": tasks, "held": held}, out)
    os.replace(beside, file)


def _is_under_test() -> bool:
    return "services.cli.main" in sys.orig_argv and sys.orig_argv[-1] in ROLES[1:]


if _is_under_test():
    _page = FaultPage(os.environ["CHAOS_PAGE"])
    assert isinstance(_page.read(), Faults)
    install(_page, sys.orig_argv[-1], os.environ["CHAOS_KV"], f"{os.environ['CHAOS_PAGE']}.{os.getpid()}")
