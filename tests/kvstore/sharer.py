"""A process that shares a folder with others; run as `python -m tests.kvstore.sharer MODE FOLDER ...`."""

import os
import signal
import sys
import time
from pathlib import Path

from kvstore.counters import TierCounters
from kvstore.janitor import Janitor
from kvstore.nvme import NvmeTier
from kvstore.tier import BlobName, Life
from tests.kvstore.tier_contract import parts


def write(root: Path, cap_bytes: int, block_bytes: int, first: int, num_blocks: int) -> None:
    """Says how many blocks it could write, and how many it evicted."""
    written = 0
    with NvmeTier(root, cap_bytes) as tier:
        for number in range(first, first + num_blocks):
            now = time.time()
            tier.write(BlobName("default", number.to_bytes(32, "big")), parts(bytes(block_bytes)), Life(now, now + 1e6))
            written += 1
        print(written, tier.counters.evicted, flush=True)


def die(root: Path, cap_bytes: int, block_bytes: int) -> None:
    """Writes a block, and another one half."""
    with NvmeTier(root, cap_bytes) as tier:
        tier.write(BlobName("default", bytes(32)), parts(bytes(block_bytes)), Life(1e9, 1e10))

        def stop(fd: int, buffers: object) -> int:
            os.write(fd, bytes(block_bytes // 2))
            print("half", flush=True)
            signal.pause()
            raise AssertionError

        os.writev = stop  # type: ignore[assignment]
        tier.write(BlobName("default", bytes([1] * 32)), parts(bytes(block_bytes)), Life(1e9, 1e10))


def janitor(root: Path) -> None:
    """Holds the janitor's lock for ever."""
    with Janitor(root, 10**9, TierCounters(), lambda victims: None)._locked(0) as locked:
        assert locked
        print("janitor", flush=True)
        signal.pause()


if __name__ == "__main__":
    mode, folder, *numbers = sys.argv[1:]
    {"write": write, "die": die, "janitor": janitor}[mode](Path(folder), *map(int, numbers))
