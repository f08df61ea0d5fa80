"""Where damaged block files go: the newest few are kept for whoever wants to know what happened to them."""

import itertools
import os
import time
from contextlib import suppress
from pathlib import Path

from kvstore.blockfile import QUARANTINE
from kvstore.inventory import Quarantined
from kvstore.tier import BlobName
from schemas.blob import KEY_BYTES

MAX_QUARANTINED = 16
_SUFFIX = ".kvb"
_numbers = itertools.count()


def move(root: Path, path: str, name: BlobName) -> tuple[bool, int]:
    """Moves the block file `path` there: whether it was still there, and the bytes of older ones that had to go.

    Raises `OSError`.
    """
    folder = root / QUARANTINE
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        number = f"{time.time_ns()}-{os.getpid()}-{next(_numbers)}"
        os.rename(path, folder / f"{number}.{name.tenant}.{name.key.hex()}{_SUFFIX}")
    except FileNotFoundError:
        return False, 0
    return True, sum(_remove(folder / old) for old in sorted(os.listdir(folder))[:-MAX_QUARANTINED])


def contents(root: Path) -> list[Quarantined]:
    """Oldest first."""
    found = []
    with suppress(OSError):
        for name in sorted(os.listdir(root / QUARANTINE)):
            with suppress(OSError, ValueError):
                key = bytes.fromhex(name.removesuffix(_SUFFIX)[-2 * KEY_BYTES :])
                size = os.stat(root / QUARANTINE / name).st_size
                found.append(Quarantined(key, size, int(name.partition("-")[0]) / 1e9))
    return found


def clear(root: Path) -> tuple[int, int]:
    """How many files were removed, and their bytes."""
    sizes = []
    with suppress(FileNotFoundError):
        sizes = [_remove(root / QUARANTINE / name) for name in os.listdir(root / QUARANTINE)]
    return len(sizes), sum(sizes)


def _remove(path: Path) -> int:
    """The bytes that came free; another process tidies up as well."""
    with suppress(FileNotFoundError):
        size = os.stat(path).st_size
        os.unlink(path)
        return size
    return 0
