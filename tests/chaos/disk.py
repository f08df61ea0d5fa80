"""A small disk for the KV folder, so that it can be filled to the last byte.

A tmpfs of its own where we may mount one; else the folder stays on its disk, and what lies under the processes says
"no space" in its place.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

DISK_BYTES = 600_000_000
BALLAST = "ballast"


class SmallDisk:
    def __init__(self, folder: Path, mounted: bool) -> None:
        self.mounted = mounted
        self._ballast = folder / BALLAST

    def fill(self) -> None:
        """Only on a mounted disk. Twice is as good as once."""
        with self._ballast.open("ab") as ballast, contextlib.suppress(OSError):
            free = os.fstatvfs(ballast.fileno())
            size = os.fstat(ballast.fileno()).st_size
            os.posix_fallocate(ballast.fileno(), size, free.f_bavail * free.f_bsize)

    def free(self) -> None:
        self._ballast.unlink(missing_ok=True)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[SmallDisk]:
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0700", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield SmallDisk(folder, mounted)
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)
