"""What a stored prefix saves: the first token of a prompt with a long known beginning, beside one that nobody knows.

The prefixes are stored by one pipeline and read by another, whose workers hold none of them in memory.
"""

import asyncio
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from kvstore.codec import codec_named
from kvstore.keys import BlockRef, block_refs, root_of
from kvstore.store import KVStore
from kvstore.tier import Tier
from schemas.errors import Internal
from services.bench.engine import load_model
from services.bench.stream import RandomPrompts, Stream, ask
from services.bus.connection import Bus
from services.engine.engine import Engine, Work
from services.engine.model import Model
from services.engine.pages import PagePool
from services.engine.storage import geometry_of, identity_of, open_tiers
from services.models.registry import resolve
from services.settings import Settings

Row = dict[str, str | int | float]

MAX_RATIO = {"nvme": 1 / 12, "valkey": 1 / 8}
MAX_OF_COST = 1.5


def prefixes(settings: Settings, num_prefixes: int, num_tokens: int) -> list[list[int]]:
    """One more than is measured: the first warms up."""
    prompts = RandomPrompts(resolve(settings.compute.model, settings.kv.data_dir).vocab_size)
    return [prompts(num_tokens) for _ in range(num_prefixes + 1)]


def store(settings: Settings, nats_url: str, known: list[list[int]]) -> None:
    """Has each computed, and stored in every tier."""
    slug = resolve(settings.compute.model, settings.kv.data_dir).slug

    async def each() -> None:
        async with await Bus.connect(nats_url, "bench", settings.bus) as bus:
            for prefix in known:
                await ask(bus, slug, prefix, 2)

    asyncio.run(each())


def run(settings: Settings, nats_url: str, known: list[list[int]], num_new: int, tier: str) -> Iterator[Row]:
    """One row a prefix, and one of medians with what loading and computing alone would take.

    Raises `Internal` if a prefix was not found: then nothing was measured.
    """
    files = resolve(settings.compute.model, settings.kv.data_dir)
    prompts = RandomPrompts(files.vocab_size)
    warms, colds = [], []
    for number, prefix in enumerate(known):
        warm, cold = asyncio.run(_pair(settings, nats_url, files.slug, prefix, prompts(num_new), prompts(len(prefix))))
        if warm.cached_tokens < len(prefix) // settings.kv.block_tokens * settings.kv.block_tokens:
            raise Internal(f"only {warm.cached_tokens} of {len(prefix)} tokens were found in the store")
        if number:
            warms.append(warm)
            colds.append(cold)
            yield {"tier": tier, "round": number, **_row([warm], [cold])}
    cost_s = _cost_s(settings, known[1:], num_new)
    medians = _row(warms, colds)
    yield {
        "tier": tier,
        "round": "medians",
        "prefix_tokens": len(known[0]),
        "new_tokens": num_new,
        **medians,
        "max_ratio": round(MAX_RATIO[tier], 4),
        "cost_ms": round(1000 * cost_s, 2),
        "of_cost": round(medians["warm_ttft_ms"] / 1000 / cost_s, 2),
        "max_of_cost": MAX_OF_COST,
    }


def _row(warms: list[Stream], colds: list[Stream]) -> dict[str, float]:
    warm_s, cold_s = (statistics.median(stream.ttft_s for stream in streams) for streams in (warms, colds))
    ratio = statistics.median(warm.ttft_s / cold.ttft_s for warm, cold in zip(warms, colds, strict=True))
    return {
        "warm_ttft_ms": round(1000 * warm_s, 2),
        "cold_ttft_ms": round(1000 * cold_s, 2),
        "ratio": round(ratio, 4),
    }


async def _pair(
    settings: Settings, nats_url: str, slug: str, prefix: list[int], new: list[int], unknown: list[int]
) -> tuple[Stream, Stream]:
    async with await Bus.connect(nats_url, "bench", settings.bus) as bus:
        return await ask(bus, slug, prefix + new, 2), await ask(bus, slug, unknown + new, 2)


def _cost_s(settings: Settings, known: list[list[int]], num_new: int) -> float:
    """The bytes of a prefix at the rate that its tier gives them here, and the rows that are new at theirs."""
    model = load_model(settings)
    files = resolve(settings.compute.model, Path(settings.kv.data_dir))
    identity = identity_of(files, model, settings.kv.block_tokens)
    tiers = open_tiers(settings.kv)
    try:
        store = KVStore(tiers, identity, geometry_of(model), codec_named(settings.kv.codec))
        root = root_of(identity, settings.bus.tenant)
        chains = [block_refs(root, prefix, settings.kv.block_tokens) for prefix in known]
        load_s = statistics.median(_load_s(store, model, settings.kv.block_tokens, refs) for refs in chains)
    finally:
        _close(tiers)
    return load_s + _compute_s(model, settings, len(known[0]), num_new)


def _close(tiers: list[Tier]) -> None:
    for tier in tiers:
        tier.close()


def _load_s(store: KVStore, model: Model, block_tokens: int, refs: list[BlockRef]) -> float:
    page = memoryview(bytearray(model.page_form(block_tokens).page_bytes))
    full = [ref for ref in refs if ref.num_tokens == block_tokens]
    began_s = time.perf_counter()
    if not all(store.load(ref, page) for ref in full):
        raise Internal("a stored block cannot be read")
    return time.perf_counter() - began_s


def _compute_s(model: Model, settings: Settings, start: int, num_new: int) -> float:
    torch.set_num_threads(settings.compute.threads or 1)
    block_tokens = settings.kv.block_tokens
    start = start // block_tokens * block_tokens
    pages = list(range(-(-(start + num_new) // block_tokens)))
    pool = PagePool(len(pages), model.page_form(block_tokens), max_idle=0)
    pool.data.zero_()
    engine, times_s = Engine(model, pool), []
    try:
        for _ in range(5):
            began_s = time.perf_counter()
            engine.run_now([Work([k % model.config.vocab_size for k in range(num_new)], start, pages)])
            times_s.append(time.perf_counter() - began_s)
    finally:
        engine.close()
    return statistics.median(times_s)
