"""What block files a folder holds: one pass over all of it, some 8 us and 100 bytes of memory a file."""

import os
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvstore.blockfile import BLOCKS, QUARANTINE, key_in
from kvstore.eviction import eviction_order
from kvstore.filetimes import expires_ns, is_reused
from kvstore.tier import BlobName
from schemas.blob import KEY_BYTES


class Victim(NamedTuple):
    """A block file as it was when the folder was counted."""

    name: BlobName
    used_ns: int


class Stock:
    """`num_bytes` counts quarantined and strange files as well, which are no victims."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._used_ns = array("q")
        self._reused = bytearray()
        self._keys = bytearray()
        self._tenants: list[str] = []
        self._first: list[int] = []  # of each tenant's blocks

    def __len__(self) -> int:
        return len(self._used_ns)

    def begin(self, tenant: str) -> None:
        self._tenants.append(tenant)
        self._first.append(len(self))

    def add(self, key: bytes, status: os.stat_result) -> None:
        self._used_ns.append(status.st_atime_ns)
        self._reused.append(is_reused(status))
        self._keys += key

    def victims(self, now_ns: int, max_victims: int) -> list[Victim]:
        """The next to go, in order."""
        used_ns, reused = np.array(self._used_ns, np.int64), np.frombuffer(bytes(self._reused), np.bool_)
        order = eviction_order(used_ns, reused, now_ns)[:max_victims]
        tenants = np.searchsorted(np.array(self._first, np.int64), order, side="right") - 1
        return [
            Victim(
                BlobName(self._tenants[tenant], bytes(self._keys[KEY_BYTES * i : KEY_BYTES * (i + 1)])),
                self._used_ns[i],
            )
            for tenant, i in zip(tenants.tolist(), order.tolist(), strict=True)
        ]


class StockTaker:
    """`on_expired` gets each expired block file and removes it; it does not count. `goes_on` may end it early.

    With a `pace` below 1 it rests between folders, so that it takes no more than that part of one core.
    """

    def __init__(
        self,
        root: Path,
        on_expired: Callable[[BlobName, os.DirEntry[str]], None],
        goes_on: Callable[[], bool],
        pace: float = 1.0,
    ) -> None:
        self._root = root
        self._on_expired = on_expired
        self._goes_on = goes_on
        self._pace = pace

    def take(self, now_ns: int) -> Stock | None:
        """None when it was ended early. Files that vanish meanwhile are not in it."""
        stock = Stock()
        for _, status in files_in(self._root / QUARANTINE):
            stock.num_bytes += status.st_size
        for tenant in folders_in(self._root / BLOCKS):
            stock.begin(tenant.name)
            for folder in folders_in(tenant):
                started_s = time.perf_counter()
                self._count(folder, tenant.name, stock, now_ns)
                if not self._goes_on():
                    return None
                if self._pace < 1:
                    time.sleep((time.perf_counter() - started_s) * (1 / self._pace - 1))
        return stock

    def _count(self, folder: Path, tenant: str, stock: Stock, now_ns: int) -> None:
        for entry, status in files_in(folder):
            key = key_in(entry.name)
            if key is None:
                stock.num_bytes += status.st_size
                continue
            if expires_ns(status) <= now_ns:
                self._on_expired(BlobName(tenant, key), entry)
                continue
            stock.num_bytes += status.st_size
            stock.add(key, status)


def folders_in(root: Path) -> list[Path]:
    with suppress(OSError), os.scandir(root) as entries:
        return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
    return []


def files_in(folder: Path) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                if not entry.is_dir(follow_symlinks=False):
                    yield entry, entry.stat(follow_symlinks=False)
