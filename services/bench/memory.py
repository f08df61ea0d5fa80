"""The most memory that a decode worker has held, with many long sequences at once."""

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from schemas.beat import BEAT_INTERVAL_S
from services.bench.engine import load_model
from services.bench.stream import MAX_PROMPT_ID, ask
from services.bus.beats import BeatTable
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
    slug = resolve(settings.compute.model, settings.kv.data_dir).slug
    pid = asyncio.run(_fill(settings, nats_url, slug, num_sequences, num_tokens))
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


async def _fill(settings: Settings, nats_url: str, slug: str, num_sequences: int, num_tokens: int) -> int:
    """Runs so many jobs, each of so many tokens, at the same time; the decode worker's process id."""
    rng = random.Random(time.time_ns())
    async with await Bus.connect(nats_url, "bench", settings.bus) as bus:
        beats = BeatTable(bus)
        await beats.start()
        try:
            await beats.wait_for(lambda table: table.listening_s >= 1.5 * BEAT_INTERVAL_S)
            (worker,) = beats.working("decode", slug)
            size = num_tokens - NUM_TOKENS
            prompts = [[rng.randrange(1000, MAX_PROMPT_ID) for _ in range(size)] for _ in range(num_sequences)]
            await asyncio.gather(*(ask(bus, slug, prompt, NUM_TOKENS) for prompt in prompts))
            return worker.pid
        finally:
            await beats.close()


def _peak_mb(status: str) -> float:
    """Of the text of /proc/<pid>/status."""
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024 / 1e6
