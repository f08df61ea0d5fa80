"""Prefill and decode speed of the bare engine: no queue, no store, no text."""

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from schemas.job import Sampling
from services.engine import loading
from services.engine.arithmetic import choose_arithmetic
from services.engine.engine import Engine, Work
from services.engine.model import Model
from services.engine.model_config import ModelConfig
from services.engine.pages import PagePool
from services.engine.sampler import Sampler
from services.models.registry import resolve
from services.settings import Settings

GREEDY = Sampling(temperature=0.0)
WARM_UP_STEPS = 3


def run(
    settings: Settings, batches: Sequence[int], ctx_tokens: int, threads: int, num_steps: int
) -> Iterator[dict[str, str | int | float]]:
    """One row for each batch size: tokens/s of all sequences together, and the median and worst step in ms.

    Each sequence has a prompt of `ctx_tokens` of its own; prefill runs in the scheduler's chunks and budget.
    """
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    model = load_model(settings)
    for num_sequences in batches:
        yield {
            "engine": f"kvrelay {settings.compute.dtype}",
            "arithmetic": model.arithmetic.name,
            "threads": torch.get_num_threads(),
            "batch": num_sequences,
            "ctx": ctx_tokens,
            **_measure(model, settings, num_sequences, ctx_tokens, num_steps),
        }


def load_model(settings: Settings) -> Model:
    files = resolve(settings.compute.model, Path(settings.kv.data_dir))
    config = ModelConfig.from_hf(files.config)
    return loading.load_model(files, choose_arithmetic(config, settings.compute.dtype, settings.kv.quantisation))


def _measure(model: Model, settings: Settings, num_sequences: int, ctx_tokens: int, num_steps: int) -> dict[str, float]:
    block_tokens = settings.kv.block_tokens
    pages_each = -(-(ctx_tokens + num_steps + WARM_UP_STEPS) // block_tokens)
    pool = PagePool(num_sequences * pages_each, model.page_form(block_tokens), max_idle=0)
    engine = Engine(model, pool)
    pages = [list(range(i * pages_each, (i + 1) * pages_each)) for i in range(num_sequences)]
    prompts = [[1000 + (k + 7 * i) % 40_000 for k in range(ctx_tokens)] for i in range(num_sequences)]
    try:
        _prefill(engine, settings, prompts[:1], pages[:1])  # fresh pages and first calls are not what is measured
        started_s = time.perf_counter()
        _prefill(engine, settings, prompts, pages)
        prefill_s = time.perf_counter() - started_s
        list(_decode(engine, pages, ctx_tokens, WARM_UP_STEPS))
        steps_s = sorted(_decode(engine, pages, ctx_tokens + WARM_UP_STEPS, num_steps))
    finally:
        engine.close()
    return {
        "prefill_tok_s": round(num_sequences * ctx_tokens / prefill_s, 1),
        "decode_tok_s": round(num_sequences * num_steps / sum(steps_s), 1),
        "step_p50_ms": round(1000 * steps_s[len(steps_s) // 2], 2),
        "step_max_ms": round(1000 * steps_s[-1], 2),
    }


def _prefill(engine: Engine, settings: Settings, prompts: list[list[int]], pages: list[list[int]]) -> None:
    """In the scheduler's passes: the first chunk of as many prompts as the budget takes, then the second chunks."""
    chunk = settings.scheduler.chunk_tokens
    together = max(1, settings.scheduler.token_budget // chunk)
    for start in range(0, len(prompts[0]), chunk):
        works = []
        for prompt, own in zip(prompts, pages, strict=True):
            rows = prompt[start : start + chunk]
            works.append(Work(rows, start, own[: -(-(start + len(rows)) // engine.pool.block_tokens)]))
        for i in range(0, len(works), together):
            engine.run_now(works[i : i + together])


def _decode(engine: Engine, pages: list[list[int]], start: int, num_steps: int) -> Iterator[float]:
    sampler = Sampler(GREEDY, 0, 0, ())
    for position in range(start, start + num_steps):
        used = -(-(position + 1) // engine.pool.block_tokens)
        works = [Work([500 + position], position, own[:used], [sampler]) for own in pages]
        started_s = time.perf_counter()
        engine.run_now(works)
        yield time.perf_counter() - started_s
