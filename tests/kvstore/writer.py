"""A process that writes blocks; run by the crash tests as `python -m tests.kvstore.writer MODE FOLDER`."""

import itertools
import os
import signal
import sys
from pathlib import Path

from kvstore.codec import codec_named
from kvstore.geometry import Geometry
from kvstore.nvme import NvmeTier
from kvstore.store import KVStore
from kvstore.tier import BlobName
from schemas.blob import ElementType
from tests.kvstore.blocks import IDENTITY, TTL_S, chain, payload_of
from tests.kvstore.tier_contract import Clock, parts

GEOMETRY = Geometry(8, 4, 64, ElementType.BFLOAT16)  # 128 kB a block of 16 tokens
NUM_BLOCKS = 20
CONTESTED = BlobName("default", bytes(32))
VERSIONS = [bytes([value]) * size for value, size in ((1, 300_000), (2, 200_000))]


def say(text: str) -> None:
    print(text, flush=True)


def store_of(tier: NvmeTier) -> KVStore:
    return KVStore([tier], IDENTITY, GEOMETRY, codec_named("lz4"))


def write_for_ever(tier: NvmeTier) -> None:
    """Saves a chain again and again, moving every block away first so that each is really written."""
    store, refs = store_of(tier), chain(NUM_BLOCKS)
    payloads = [payload_of(ref, GEOMETRY) for ref in refs]
    for ref, payload in itertools.cycle(zip(refs, payloads, strict=True)):
        tier.quarantine(ref.name)
        store.save(ref, payload, TTL_S)
        say("saved")


def stop_half_way(tier: NvmeTier) -> None:
    """Writes half of a block, then waits for the end."""
    ref = chain(1)[0]
    real = os.writev

    def half(fd: int, buffers: list[memoryview]) -> int:
        blob = b"".join(buffers)
        real(fd, [blob[: len(blob) // 2]])
        say("half")
        signal.pause()
        raise AssertionError

    os.writev = half  # type: ignore[assignment]
    store_of(tier).save(ref, payload_of(ref, GEOMETRY), TTL_S)


def overwrite(tier: NvmeTier) -> None:
    """Replaces one blob by another and back."""
    for number in range(100):
        tier.write(CONTESTED, parts(VERSIONS[number % 2]), Clock().life())
    say("done")


if __name__ == "__main__":
    mode, folder = sys.argv[1:]
    {"for-ever": write_for_ever, "half": stop_half_way, "overwrite": overwrite}[mode](NvmeTier(Path(folder), 10**9))
