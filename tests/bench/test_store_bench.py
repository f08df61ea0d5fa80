"""Several writers store each block once; a look-up does the same work in a full store as in an empty one."""

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.nvme import NvmeTier
from kvstore.tier import Life
from services.bench import lookup
from services.bench.dedupe import refs_of, replay
from services.bench.store import SECTIONS
from services.bench.trace import made_up_trace
from services.cli.bench import STORE_SECTIONS


def test_eight_writers_store_each_block_once(tmp_path: Path) -> None:
    """But for the moment of a cold start, when they all write the same few system prompts: one goes before."""
    chains = [request.blocks for request in made_up_trace(150, seed=1)]
    distinct = len({block for chain in chains for block in chain})
    bound = sum(map(len, chains)) - distinct  # accesses that need no write
    writes = replay(tmp_path, chains[:40], num_writers=1) + replay(tmp_path, chains, num_writers=8)
    assert len(list(tmp_path.glob("blocks/*/*/*.kvb"))) == distinct and bound > distinct / 2
    assert 0 <= writes - distinct <= 0.01 * bound


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each function of the operating system that touches files is called, by this thread or another."""
    counted: Counter[str] = Counter()

    def counting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            counted[name] += 1
            return real(*arguments, **options)

        return call

    for name in ("stat", "lstat", "open", "scandir", "listdir", "read", "readv", "pread", "access", "utime"):
        monkeypatch.setattr(os, name, counting(name, getattr(os, name)))
    return counted


def test_a_lookup_does_as_much_in_a_store_of_100000_blocks_as_of_10000(tmp_path: Path, calls: Counter[str]) -> None:
    """One call of the operating system a block, and no folder is listed."""
    refs = refs_of(range(100))
    before = 0
    for size in (10_000, 100_000):
        lookup.fill(tmp_path, before, size - before)
        before = size
        with NvmeTier(tmp_path, 10**12) as tier:
            for ref in refs[:60]:
                tier.write(ref.name, [memoryview(b"")], Life(1e9, 1e10))
        # The janitor, which lists all of them, is gone; present needs nothing of it.
        calls.clear()
        assert tier.present([ref.name for ref in refs]) == 60
        assert calls == {"stat": 61}
    assert sum(1 for folder in (tmp_path / "blocks" / "default").iterdir() for _ in folder.iterdir()) == before + 60


def test_the_command_knows_every_section() -> None:
    assert list(SECTIONS) == STORE_SECTIONS
