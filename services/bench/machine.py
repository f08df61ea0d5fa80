"""What of this machine decides how fast an engine is."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import torch

BUFFER_BYTES = 512 << 20  # far more than any cache
PASSES = 5
_TOLD_FLAGS = ["avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"]
_TOLD_FLAGS += ["avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"]


def processor() -> dict[str, str]:
    """`cpu` and those of its `flags` that engines make use of; empty where the system does not tell."""
    told: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0].splitlines():
            name, _, value = line.partition(":")
            told[name.strip()] = value.strip()
    has = set(told.get("flags", told.get("Features", "")).split())
    return {"cpu": told.get("model name", ""), "flags": " ".join(flag for flag in _TOLD_FLAGS if flag in has)}


class ReadBandwidth:
    """Of memory, by torch's threads, over a buffer that no cache holds. The best of all that was measured counts."""

    def __init__(self) -> None:
        self.gb_s = 0.0
        self._buffer = torch.ones(BUFFER_BYTES // 4)

    def measure(self) -> None:
        reads: list[Callable[[], object]] = [self._buffer.sum, self._buffer.max, lambda: self._buffer.dot(self._buffer)]
        for _ in range(PASSES):
            for read in reads:
                began_s = time.perf_counter()
                read()
                self.gb_s = max(self.gb_s, BUFFER_BYTES / (time.perf_counter() - began_s) / 1e9)
