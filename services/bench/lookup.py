"""Whether looking a prompt up takes longer in a fuller store."""

import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvstore.blockfile import BLOCKS
from kvstore.keys import BlockRef
from kvstore.nvme import NvmeTier
from kvstore.tier import BlobName, Life
from services.bench.dedupe import refs_of

Row = dict[str, str | int | float]

NUM_BLOCKS = 128
ROUNDS = 200
MAX_RATIO = 2.0
TENANT = "default"
_NAMES_EACH = 10_000  # file systems allow an inode so many: ext4 65,000
_STEP = 0x9E3779B97F4A7C15F39CC0605CEDC8341082276BF3A27251F86C6A11D0C18E95


def run(sizes: Iterable[int]) -> Iterator[Row]:
    """One row a size: microseconds for a prompt whose blocks are all stored but the last, and the ratio to the first
    size. Prompts differ from round to round."""
    with tempfile.TemporaryDirectory(prefix="kvrelay-bench-") as folder:
        base_us = 0.0
        num_stored = 0
        for size in sorted(sizes):
            fill(Path(folder), num_stored, size - num_stored)
            num_stored = size
            took_us = _lookup_us(Path(folder))
            base_us = base_us or took_us
            yield {
                "bench": "lookup",
                "stored": size,
                "prompt_blocks": NUM_BLOCKS,
                "us": round(took_us, 1),
                "ratio": round(took_us / base_us, 2),
                "max_ratio": MAX_RATIO,
            }


def fill(root: Path, first: int, num_blocks: int) -> None:
    """Puts that many empty block files in a store that nobody has open. They share inodes: names are what counts."""
    for number in range(256):
        os.makedirs(root / BLOCKS / TENANT / f"{number:02x}", 0o700, exist_ok=True)
    expires_s = time.time() + 1e6
    source = ""
    for number in range(first, first + num_blocks):
        key = _key(number)
        path = f"{root}/{BLOCKS}/{TENANT}/{key[:2]}/{key}.kvb"
        if (number - first) % _NAMES_EACH:
            os.link(source, path)
        else:
            source = path
            os.mknod(path, 0o600)
            os.utime(path, (expires_s, expires_s))


def _key(number: int) -> str:
    """As evenly spread as hashes are: the step is odd, so no two are the same."""
    return f"{number * _STEP % 2**256:064x}"


def _lookup_us(root: Path) -> float:
    with NvmeTier(root, 10**12) as tier:
        chains = [refs_of(range(NUM_BLOCKS * number, NUM_BLOCKS * (number + 1))) for number in range(ROUNDS)]
        for chain in chains:
            for ref in chain[:-1]:
                tier.write(ref.name, [memoryview(b"")], Life(time.time(), time.time() + 1e6))
        return 1e6 * statistics.median(_seconds(tier, chain) for chain in chains)


def _seconds(tier: NvmeTier, chain: list[BlockRef]) -> float:
    names: list[BlobName] = [ref.name for ref in chain]
    started_s = time.perf_counter()
    found = tier.present(names)
    took_s = time.perf_counter() - started_s
    assert found == len(chain) - 1
    return took_s
