"""Decode steps of the bare engine in two ways in turn: over shared and own pages, over two forms of K and V."""

import statistics
import time
from collections.abc import Iterator, Sequence

import torch

from schemas.blob import Quantisation
from services.bench.engine import GREEDY, WARM_UP_STEPS, load_model
from services.bench.store_codecs import with_quantisation
from services.engine.engine import Engine, Work
from services.engine.model import Model
from services.engine.pages import PagePool
from services.engine.sampler import Sampler
from services.settings import Settings

Row = dict[str, str | int | float]
Pages = list[list[int]]


def shared_prefix(
    settings: Settings, threads: int, num_sequences: int, num_prefix: int, num_steps: int, rounds: int
) -> Iterator[Row]:
    """Sequences that begin with the same `num_prefix` tokens: with the prefix in pages that all of them hold, and with
    a copy of it for each. The last row has the medians and their ratio, own over shared."""
    torch.set_num_threads(threads)
    bench = _Decode(load_model(settings), settings.kv.block_tokens)
    num_shared = num_prefix // bench.block_tokens
    each = -(-(num_prefix + WARM_UP_STEPS + num_steps) // bench.block_tokens)
    pool = bench.pool(num_shared + num_sequences * each)
    fresh = iter(range(pool.num_pages))
    prefix = [next(fresh) for _ in range(num_shared)]
    own = [[next(fresh) for _ in range(each)] for _ in range(num_sequences)]
    layouts = {"shared": [prefix + pages[num_shared:] for pages in own], "own": own}
    for pages in own:
        pool.data[pages[:num_shared]] = pool.data[prefix]
    start = num_shared * bench.block_tokens
    taken: dict[str, list[float]] = {name: [] for name in layouts}
    for number in range(rounds):
        for name, layout in layouts.items():
            taken[name].append(bench.step_s(pool, layout, start, num_steps))
        yield {"round": number + 1, **{f"{name}_step_ms": round(1000 * s[-1], 3) for name, s in taken.items()}}
    shared_s, own_s = (statistics.median(taken[name]) for name in ("shared", "own"))
    yield {
        "round": "medians",
        "arithmetic": bench.model.arithmetic.name,
        "threads": threads,
        "sequences": num_sequences,
        "prefix_tokens": start,
        "pages_shared": len({page for pages in layouts["shared"] for page in pages}),
        "pages_own": len({page for pages in own for page in pages}),
        "shared_step_ms": round(1000 * shared_s, 3),
        "own_step_ms": round(1000 * own_s, 3),
        "own_to_shared": round(own_s / shared_s, 3),
        "min_own_to_shared": 2.0,
    }


def kv_forms(
    settings: Settings, threads: int, batches: Sequence[int], ctx_tokens: int, num_steps: int, rounds: int
) -> Iterator[Row]:
    """K and V as they are computed, and int8: one row a batch size, with the ratio plain over int8."""
    torch.set_num_threads(threads)
    plain = load_model(settings)
    models = {"plain": plain, "int8": with_quantisation(plain, Quantisation.INT8)}
    for batch in batches:
        taken: dict[str, list[float]] = {name: [] for name in models}
        benches = {name: _Decode(model, settings.kv.block_tokens) for name, model in models.items()}
        each = -(-(ctx_tokens + WARM_UP_STEPS + num_steps) // settings.kv.block_tokens)
        pools = {name: bench.pool(batch * each) for name, bench in benches.items()}
        pages = [list(range(i * each, (i + 1) * each)) for i in range(batch)]
        for _ in range(rounds):
            for name, bench in benches.items():
                taken[name].append(bench.step_s(pools[name], pages, ctx_tokens, num_steps))
        plain_s, int8_s = (statistics.median(taken[name]) for name in models)
        yield {
            "arithmetic": plain.arithmetic.name,
            "threads": threads,
            "batch": batch,
            "ctx": ctx_tokens,
            **{f"{name}_bytes_a_token": model.kv_bytes_per_token for name, model in models.items()},
            "plain_step_ms": round(1000 * plain_s, 3),
            "int8_step_ms": round(1000 * int8_s, 3),
            "plain_to_int8": round(plain_s / int8_s, 3),
            "min_plain_to_int8": 1.15,
        }


class _Decode:
    def __init__(self, model: Model, block_tokens: int) -> None:
        self.model = model
        self.block_tokens = block_tokens

    def pool(self, num_pages: int) -> PagePool:
        """Of pages that have been written to: fresh memory is not what is measured."""
        pool = PagePool(num_pages, self.model.page_form(self.block_tokens), max_idle=0)
        pool.data.zero_()
        return pool

    def step_s(self, pool: PagePool, pages: Pages, start: int, num_steps: int) -> float:
        """The median of `num_steps` steps of all sequences, after some to warm up."""
        engine = Engine(self.model, pool)
        sampler, times_s = Sampler(GREEDY, 0, 0, ()), []
        try:
            for position in range(start, start + WARM_UP_STEPS + num_steps):
                used = position // self.block_tokens + 1
                works = [Work([500 + position], position, own[:used], [sampler]) for own in pages]
                began_s = time.perf_counter()
                engine.run_now(works)
                times_s.append(time.perf_counter() - began_s)
        finally:
            engine.close()
        return statistics.median(times_s[WARM_UP_STEPS:])
