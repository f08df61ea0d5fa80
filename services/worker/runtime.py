"""Everything a worker computes with, loaded once: model, text, KV pages, store, and the identity of the build."""

import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from kernels.dispatch import choose

from kvstore.store import KVStore
from services.engine.batch import Batch
from services.engine.blocks import Blocks
from services.engine.check import self_check
from services.engine.engine import Engine
from services.engine.model import Model
from services.engine.pages import PagePool
from services.engine.storage import identity_of, open_store
from services.models.files import ModelFiles
from services.models.registry import build_id, resolve
from services.settings import Settings
from services.text.model import TextModel, load_text

log = logging.getLogger(__name__)

MAX_MEMORY_SHARE = 0.2  # of the machine, for one worker's KV pages, where the settings do not say
IDLE_CONTEXTS = 2  # whole contexts of released blocks that may stay resident


def set_threads(settings: Settings) -> None:
    """One compute thread for each core that this process owns, unless the settings say otherwise."""
    torch.set_num_threads(settings.compute.threads or len(os.sched_getaffinity(0)))


@dataclass
class Runtime:
    settings: Settings
    files: ModelFiles
    text: TextModel
    build: str
    engine: Engine
    pool: PagePool
    blocks: Blocks
    store: KVStore
    io: ThreadPoolExecutor

    @classmethod
    def load(cls, settings: Settings) -> "Runtime":
        """Loads and checks the model; seconds. Raises `SetupError`. The caller closes it."""
        started = time.monotonic()
        data_dir = Path(settings.kv.data_dir)
        files = resolve(settings.compute.model, data_dir)
        text = load_text(files)
        model = Model(files, choose(settings.compute.dtype))
        self_check(model, files)
        pool = _make_pool(model, settings)
        identity = identity_of(files, model, settings.kv.block_tokens)
        store = open_store(settings.kv, identity, model)
        io = ThreadPoolExecutor(max_workers=4, thread_name_prefix="store")
        blocks = Blocks(
            store,
            identity,
            pool,
            io,
            ttl_s=settings.kv.ttl_s,
            partial_ttl_s=settings.kv.partial_ttl_s,
            fetch_budget_s=settings.kv.fetch_budget_s,
        )
        build = build_id(files, model.arithmetic.id)
        log.info(
            "model %s build %s arithmetic %s: %d KV pages of %d tokens, loaded in %.1f s",
            files.slug, build, model.arithmetic.name, pool.num_pages, pool.block_tokens, time.monotonic() - started,
        )  # fmt: skip
        return cls(settings, files, text, build, Engine(model, pool), pool, blocks, store, io)

    @property
    def context_pages(self) -> int:
        """Pages of a sequence that fills the model's context."""
        return self.pages_for(self.text.context_tokens)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_tokens)

    def batch(self, *, chunk_tokens: int, token_budget: int) -> Batch:
        return Batch(self.engine, chunk_tokens=chunk_tokens, token_budget=token_budget)

    def close(self) -> None:
        self.engine.close()
        self.io.shutdown(wait=True)
        for tier in self.store.tiers:
            tier.close()


def _make_pool(model: Model, settings: Settings) -> PagePool:
    """Pages for `max_sequences` whole contexts if memory allows, and never fewer than for one."""
    config, block_tokens = model.config, settings.kv.block_tokens
    context_pages = -(-config.context_tokens // block_tokens)
    page_bytes = model.kv_bytes_per_token * block_tokens
    budget = settings.scheduler.kv_memory_bytes or int(psutil.virtual_memory().total * MAX_MEMORY_SHARE)
    num_pages = min(settings.scheduler.max_sequences * context_pages, budget // page_bytes)
    return PagePool(
        max(num_pages, context_pages),
        (config.num_layers, config.num_kv_heads, config.head_dim, block_tokens),
        model.arithmetic.kv_dtype,
        max_idle=IDLE_CONTEXTS * context_pages,
    )
