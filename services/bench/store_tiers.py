"""Put and get GB/s of each tier, beside the raw limit of what lies under it.

GB are those of payloads, before the codec. All that is compared is measured in turns, so that a drift of the machine
hits all of it. Payloads are noise around a mean for each channel, which is what byte planes compress in real KV.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from kvstore.codec import codec_named
from kvstore.geometry import Geometry
from kvstore.keys import BlockRef, Identity, block_refs, root_of
from kvstore.nvme import NvmeTier
from kvstore.redis.tier import RedisTier, key_of
from kvstore.redis.yardstick import bare_reader, redis_py_reader
from kvstore.store import KVStore
from kvstore.tier import Tier
from kvstore.yardstick import hash_once
from schemas.blob import HEADER_BYTES, ElementType

GEOMETRY = Geometry(30, 3, 64, ElementType.BFLOAT16)  # SmolLM2-135M
CODECS = ("none", "lz4")
BLOCK_TOKENS = (64, 256)
TOTAL_BYTES = 48_000_000  # a round's
THREADS = 4  # as many as a worker reads with
_TTL_S = 600.0
_TIMEOUT_S = 10.0

Row = dict[str, str | int | float]


Calls = dict[str, Callable[[], object]]


def run(folder: Path, redis_url: str, rounds: int = 5, codecs: Sequence[str] = CODECS) -> Iterator[Row]:
    """One row for each tier, codec and block size. `redis_url` "": without Redis. Leaves its blocks in both."""
    for block_tokens in BLOCK_TOKENS:
        for codec in codecs:
            nvme = NvmeTier(folder, 10 * TOTAL_BYTES)
            yield _Bench(nvme, codec, block_tokens).row(rounds, _under_nvme)
            if redis_url:
                redis = RedisTier(redis_url, timeout_s=_TIMEOUT_S)
                yield _Bench(redis, codec, block_tokens).row(rounds, lambda bench: _under_redis(bench, redis_url))


class _Bench:
    def __init__(self, tier: Tier, codec: str, block_tokens: int) -> None:
        self.tier = tier
        self.block_bytes = GEOMETRY.payload_bytes(block_tokens)
        identity = Identity(
            fingerprint=b"bench---",
            tokenizer_hash=b"bench---",
            arithmetic=time.time_ns().to_bytes(8, "little"),  # nobody has stored these blocks yet
            dtype=GEOMETRY.dtype,
            block_tokens=block_tokens,
        )
        num_blocks = max(4, TOTAL_BYTES // self.block_bytes)
        self.refs: list[BlockRef] = block_refs(
            root_of(identity, "bench"), range(num_blocks * block_tokens), block_tokens
        )
        self.payload = _payload(block_tokens)
        self._row: Row = {
            "tier": tier.name,
            "codec": codec,
            "block_tokens": block_tokens,
            "block_bytes": self.block_bytes,
        }
        self._store = KVStore([tier], identity, GEOMETRY, codec_named(codec))
        self._threads = ThreadPoolExecutor(THREADS)
        self._buffer = memoryview(bytearray(self.payload))
        self._buffers = [memoryview(bytearray(self.payload)) for _ in range(THREADS)]

    def row(self, rounds: int, under: "Callable[[_Bench], Calls]") -> Row:
        puts = [self._gb_s(self._put)]  # the first time: an overwrite would find the blocks there
        calls: Calls = {"get": self._get, "get_parallel": self._get_in_parallel}
        calls |= {"blake3": self._hash, **under(self)}
        found: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(rounds + 1):
            for name, call in calls.items():
                rate = self._gb_s(call)
                if number:  # the first round warms up
                    found[name].append(rate)
        self._threads.shutdown()
        self.tier.close()
        medians = {name: statistics.median(rates) for name, rates in found.items()}
        ratios = {
            f"{how}of_{name}": round(statistics.median(a / b for a, b in zip(found[get], found[name], strict=True)), 2)
            for how, get in (("", "get"), ("parallel_", "get_parallel"))
            for name in medians
            if name not in ("get", "get_parallel")
        }
        speeds = {f"{name}_gb_s": round(rate, 2) for name, rate in {"put": puts[0], **medians}.items()}
        stored = self._store.counters.stored_bytes / max(1, self._store.counters.payload_bytes)
        return {**self._row, "stored_share": round(stored, 3), **speeds, **ratios}

    def _gb_s(self, call: Callable[[], object]) -> float:
        began_s = time.perf_counter()
        call()
        return len(self.refs) * self.block_bytes / (time.perf_counter() - began_s) / 1e9

    def _put(self) -> None:
        for ref in self.refs:
            assert self._store.save(ref, self.payload, _TTL_S)

    def _get(self) -> None:
        for ref in self.refs:
            assert self._store.load(ref, self._buffer)

    def _get_in_parallel(self) -> None:
        shares = [self.refs[number::THREADS] for number in range(THREADS)]

        def get(share: Sequence[BlockRef], buffer: memoryview) -> bool:
            return all(self._store.load(ref, buffer) for ref in share)

        assert all(self._threads.map(get, shares, self._buffers))

    def _hash(self) -> None:
        for _ in self.refs:
            hash_once(self.payload)


def _under_nvme(bench: _Bench) -> Calls:
    """Reading the files from the page cache into a buffer that is used again."""
    assert isinstance(bench.tier, NvmeTier)
    paths = [bench.tier.path(ref.name) for ref in bench.refs]
    buffer = memoryview(bytearray(bench.block_bytes + HEADER_BYTES))

    def read() -> None:
        for path in paths:
            fd = os.open(path, os.O_RDONLY)
            try:
                os.readv(fd, [buffer])
            finally:
                os.close(fd)

    return {"page_cache": read}


def _under_redis(bench: _Bench, url: str) -> Calls:
    """A bare pipelined loop of `recv_into`, and redis-py."""
    keys = [key_of(ref.name) for ref in bench.refs]
    size = bench.tier.read(bench.refs[0].name, [memoryview(bytearray(HEADER_BYTES))])
    assert size is not None
    return {"recv_into": bare_reader(url, keys, size), "redis_py": redis_py_reader(url, keys)}


def _payload(tokens: int) -> memoryview:
    rng = np.random.default_rng(tokens)
    rows = 2 * GEOMETRY.layers * GEOMETRY.heads
    mean = rng.normal(0, 2, (rows, 1, GEOMETRY.head_dim)).astype("<f4")
    values = mean + 0.1 * rng.standard_normal((rows, tokens, GEOMETRY.head_dim), dtype=np.float32)
    return memoryview((values.view("<u4") >> 16).astype("<u2").tobytes())
