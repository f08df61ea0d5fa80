"""Writers that die, and readers that overlap writers, in processes of their own."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.nvme import NvmeTier
from tests.kvstore.blocks import TTL_S, chain, empty, payload_of
from tests.kvstore.tier_contract import read
from tests.kvstore.writer import CONTESTED, GEOMETRY, NUM_BLOCKS, VERSIONS, store_of

pytestmark = pytest.mark.chaos


@contextmanager
def writer(mode: str, folder: Path) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "tests.kvstore.writer", mode, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(process: "subprocess.Popen[str]", text: str, times: int = 1) -> None:
    assert process.stdout is not None
    for _ in range(times):
        assert process.stdout.readline().strip() == text


def temporary_in(folder: Path) -> list[Path]:
    return list(folder.glob("tmp/*.part"))


@pytest.mark.parametrize("saves", [1, 7, 20, 33, 60])
def test_a_writer_killed_at_any_moment_leaves_whole_blocks(saves: int, tmp_path: Path) -> None:
    with writer("for-ever", tmp_path) as process:
        wait_for(process, "saved", saves)
        process.kill()
    tier = NvmeTier(tmp_path, 10**9)
    store = store_of(tier)
    refs = chain(NUM_BLOCKS)
    there = [ref for ref in refs if os.path.exists(tier.path(ref.name))]
    assert there
    for ref in there:
        into = empty(ref, GEOMETRY)
        assert store.load(ref, into)
        assert into == payload_of(ref, GEOMETRY)
    assert store.counters.damaged == store.counters.mismatched == 0
    assert temporary_in(tmp_path) == []
    tier.close()


def test_a_half_written_file_is_never_served_and_goes_with_its_writer(tmp_path: Path) -> None:
    ref = chain(1)[0]
    with writer("half", tmp_path) as process:
        wait_for(process, "half")
        beside = NvmeTier(tmp_path, 10**9)
        assert len(temporary_in(tmp_path)) == 1, "the file of a living writer is not ours to remove"
        store = store_of(beside)
        assert store.lookup([ref]) == 0
        assert not store.load(ref, empty(ref, GEOMETRY))
        process.kill()
    after = NvmeTier(tmp_path, 10**9)
    assert temporary_in(tmp_path) == []
    assert store_of(after).save(ref, payload_of(ref, GEOMETRY), TTL_S)
    assert store.load(ref, empty(ref, GEOMETRY))
    assert store.counters.damaged == 0
    beside.close()
    after.close()


def test_readers_see_the_old_blob_or_the_new_one(tmp_path: Path) -> None:
    """Two processes overwrite one key with blobs of two sizes while this one reads it."""
    tier = NvmeTier(tmp_path, 10**9)
    seen = set()
    with writer("overwrite", tmp_path) as one, writer("overwrite", tmp_path) as other:
        while one.poll() is None or other.poll() is None:
            blob = read(tier, CONTESTED, 400_000)
            if blob is not None:
                seen.add(blob)
        wait_for(one, "done")
        wait_for(other, "done")
    assert seen == set(VERSIONS)
    assert len(list(tmp_path.glob("blocks/*/??/*.kvb"))) == 1
    tier.close()


def test_writers_of_one_block_agree(tmp_path: Path) -> None:
    with writer("for-ever", tmp_path) as one, writer("for-ever", tmp_path) as other:
        tier = NvmeTier(tmp_path, 10**9)
        store, refs = store_of(tier), chain(NUM_BLOCKS)
        for process in (one, other):
            wait_for(process, "saved", NUM_BLOCKS)
        for ref in refs:
            into = empty(ref, GEOMETRY)
            if store.load(ref, into):
                assert into == payload_of(ref, GEOMETRY)
        assert store.counters.hits > 0
        assert store.counters.damaged == store.counters.mismatched == 0
        tier.close()
