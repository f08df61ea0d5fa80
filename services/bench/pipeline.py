"""What the queue, the store and the stream cost: one stream through a running pipeline, beside the bare engine.

The two take turns, so that a drift of the machine hits both. The engine computes on the decode worker's cores with
its number of threads while the pipeline idles.
"""

import asyncio
import os
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from schemas.job import Sampling
from services.bench.engine import load_model
from services.bench.stream import RandomPrompts, Stream, ask
from services.bus.connection import Bus
from services.engine.engine import Engine, Work
from services.engine.model import Model
from services.engine.pages import PagePool
from services.engine.sampler import Sampler
from services.models.registry import resolve
from services.settings import Settings

GREEDY = Sampling(temperature=0.0)


def run(
    settings: Settings, nats_url: str, cores: list[int], threads: int, num_prompt: int, num_tokens: int, rounds: int
) -> Iterator[dict[str, str | int | float]]:
    """One row a round, and one of medians. Each round has a prompt that nobody has seen."""
    bench = _Bench(settings, nats_url, cores, threads)
    streams, engines = [], []
    try:
        for number in range(rounds + 1):
            prompt = bench.prompts(num_prompt)
            streams.append(asyncio.run(bench.ask(prompt, num_tokens)))
            engines.append(bench.compute(prompt, num_tokens))
            if number:  # the first round warms both up
                yield {"round": number, **_row(streams[-1:], engines[-1:])}
    finally:
        bench.close()
    yield {
        "round": "medians",
        "threads": threads,
        "prompt_tokens": num_prompt,
        "tokens": num_tokens,
        **_row(streams[1:], engines[1:]),
    }


def _row(streams: list[Stream], engines: list[Stream]) -> dict[str, float]:
    pipeline_tok_s = statistics.median(stream.tokens_per_s for stream in streams)
    engine_tok_s = statistics.median(stream.tokens_per_s for stream in engines)
    ratios = [s.tokens_per_s / e.tokens_per_s for s, e in zip(streams, engines, strict=True)]
    return {
        "pipeline_tok_s": round(pipeline_tok_s, 2),
        "engine_tok_s": round(engine_tok_s, 2),
        "ratio": round(statistics.median(ratios), 3),
        "ttft_ms": round(1000 * statistics.median(stream.ttft_s for stream in streams), 2),
        "ttft_added_ms": round(1000 * statistics.median(stream.added_s for stream in streams), 2),
        "engine_ttft_ms": round(1000 * statistics.median(stream.ttft_s for stream in engines), 2),
        "gap_0_to_1_ms": round(1000 * statistics.median(stream.first_gap_s for stream in streams), 2),
        "engine_step_ms": round(1000 / engine_tok_s, 2),
    }


class _Bench:
    def __init__(self, settings: Settings, nats_url: str, cores: list[int], threads: int) -> None:
        self._settings = settings
        self._nats_url = nats_url
        files = resolve(settings.compute.model, Path(settings.kv.data_dir))
        self.prompts = RandomPrompts(files.vocab_size)
        self._slug = files.slug
        self._thread = ThreadPoolExecutor(1, initializer=os.sched_setaffinity, initargs=(0, cores))
        torch.set_num_threads(threads)
        self._model: Model = self._thread.submit(load_model, settings).result()

    async def ask(self, prompt: list[int], num_tokens: int) -> Stream:
        async with await Bus.connect(self._nats_url, "bench", self._settings.bus) as bus:
            return await ask(bus, self._slug, prompt, num_tokens)

    def compute(self, prompt: list[int], num_tokens: int) -> Stream:
        return self._thread.submit(_compute, self._model, self._settings, prompt, num_tokens).result()

    def close(self) -> None:
        self._thread.shutdown()


def _compute(model: Model, settings: Settings, prompt: list[int], num_tokens: int) -> Stream:
    block_tokens = settings.kv.block_tokens
    num_pages = -(-(len(prompt) + num_tokens) // block_tokens)
    pool = PagePool(num_pages, model.page_form(block_tokens), max_idle=0)
    pool.data.zero_()  # fresh pages cost more than the pass; the worker's have been used before
    engine = Engine(model, pool)
    sampler = Sampler(GREEDY, 0, 0, ())
    tokens_s: list[float] = []
    rows, start, chunk = prompt, 0, settings.scheduler.chunk_tokens
    started_s = time.perf_counter()
    while len(tokens_s) < num_tokens:
        part, rest = rows[:chunk], rows[chunk:]
        pages = list(range(-(-(start + len(part)) // block_tokens)))
        (outcome,) = engine.run_now([Work(part, start, pages, [] if rest else [sampler], len(tokens_s))])
        start += len(part)
        rows = rest
        if not rest:
            assert isinstance(outcome, list)
            tokens_s.append(time.perf_counter() - started_s)
            rows = [outcome[0].id]
    engine.close()
    return Stream(tokens_s, tokens_s[0])
