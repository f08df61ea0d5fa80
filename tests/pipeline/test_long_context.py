"""A context of 32,768 tokens through both stages: what it takes beside its KV does not grow with it."""

from pathlib import Path

import msgspec
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from kernels.int8_arithmetic import Int8Arithmetic
from schemas.job import Sampling
from services.engine.native_model import NativeModel
from tests.gateway.tiny_model import tiny_text
from tests.golden.oracle import generate
from tests.model.test_families import SIZES
from tests.model.tiny import tiny_model
from tests.model.tiny_gguf_model import save_gguf
from tests.pipeline.local import run_pipeline, settings_for
from tests.pipeline.tiny import SLUG, tiny_files

CONTEXT = 32_768
NUM_TOKENS = 24
MEMORY_MB = 60  # measured 16: blocks and events pass through


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is Linux's to tell")
async def test_a_prompt_of_32k_tokens(broker: str, tmp_path: Path):
    torch.set_num_threads(1)
    text = msgspec.structs.replace(tiny_text(SLUG), context_tokens=CONTEXT)
    # Attention is nearly all of the work: a layer of it is enough.
    sizes = {**SIZES, "num_hidden_layers": 1, "vocab_size": text.vocab_size, "max_position_embeddings": CONTEXT}
    made = save_gguf(tmp_path / "long.gguf", tiny_model(**sizes), Type.Q8_0)
    files = msgspec.structs.replace(
        tiny_files(), config=made.config, weights=made.weights, context_tokens=CONTEXT, fingerprint=b"longlong"
    )
    prompt = [(7919 * i + i // 251) % 200 + 5 for i in range(CONTEXT - NUM_TOKENS)]
    job = {"prompt_token_ids": prompt, "max_tokens": NUM_TOKENS, "seed": 1, "temperature": 1.0, "ignore_eos": True}
    models = NativeModel(files, Int8Arithmetic()), NativeModel(files, Int8Arithmetic())
    kv_mb = models[0].kv_bytes_per_token * CONTEXT / 1e6
    settings = settings_for(tmp_path / "data", scheduler={"max_sequences": 2, "kv_memory_bytes": int(2.5e6 * kv_mb)})
    async with run_pipeline(broker, files, text, models, (settings, settings)) as pipeline:
        before_mb = restart_peak_mb()
        cold = await pipeline.ask(**job)
        warm = await pipeline.ask(**job)
        grown_mb = peak_mb() - before_mb
    sampling = Sampling(max_tokens=NUM_TOKENS, seed=1, temperature=1.0, n=1, ignore_eos=True)
    assert [cold.token_ids(0)] == generate(models[0], prompt, sampling)
    assert warm.essence == cold.essence
    assert warm.start.cached_tokens >= CONTEXT - NUM_TOKENS - 64
    assert grown_mb < 2 * kv_mb + MEMORY_MB, f"{grown_mb:.0f} MB, of which {2 * kv_mb:.0f} for K and V"


def restart_peak_mb() -> float:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return peak_mb()


def peak_mb() -> float:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1000
