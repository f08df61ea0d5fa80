"""The most memory that a decode worker has held, with many long sequences at once."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from services.bench.engine import load_model
from services.bench.load import decode_pid
from services.bench.stream import SILENCE_S, RandomPrompts, ask
from services.bus.connection import Bus
from services.models.registry import resolve
from services.settings import Settings

MAX_OVER_MB = 300
NUM_TOKENS = 64
_BARE = "import torch; print(open('/proc/self/status', encoding='utf-8').read())"


def run(
    settings: Settings, nats_url: str, num_sequences: int, num_tokens: int
) -> Iterator[dict[str, str | int | float]]:
    """One row. The pipeline must be fresh: a peak says nothing of when it was."""
    files = resolve(settings.compute.model, settings.kv.data_dir)
    prompts = RandomPrompts(files.vocab_size)
    asked = [prompts(num_tokens - NUM_TOKENS) for _ in range(num_sequences)]
    pid = asyncio.run(_fill(settings, nats_url, files.slug, asked))
    peak_mb = _peak_mb(Path(f"/proc/{pid}/status").read_text(encoding="utf-8"))
    bare = subprocess.run([sys.executable, "-c", _BARE], capture_output=True, encoding="utf-8", check=True).stdout
    model = load_model(settings)
    kv_mb = num_sequences * num_tokens * model.kv_bytes_per_token / 1e6
    weights_mb = model.weight_bytes / 1e6
    yield {
        "arithmetic": model.arithmetic.name,
        "sequences": num_sequences,
        "tokens": num_tokens,
        "peak_mb": round(peak_mb),
        "weights_mb": round(weights_mb),
        "kv_mb": round(kv_mb),
        "bare_torch_mb": round(_peak_mb(bare)),
        "over_mb": round(peak_mb - weights_mb - kv_mb - _peak_mb(bare)),
        "max_over_mb": MAX_OVER_MB,
    }


async def _fill(settings: Settings, nats_url: str, slug: str, prompts: list[list[int]]) -> int:
    """Answers to all at the same time; the decode worker's process id.

    The last one is silent until the prompts of all others are computed, and so may wait for as many silences.
    """
    async with await Bus.connect(nats_url, "bench", settings.bus) as bus:
        pid = await decode_pid(bus, slug)
        silence_s = SILENCE_S * len(prompts)
        await asyncio.gather(*(ask(bus, slug, prompt, NUM_TOKENS, silence_s=silence_s) for prompt in prompts))
        return pid


def _peak_mb(status: str) -> float:
    """Of the text of /proc/<pid>/status."""
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024 / 1e6
