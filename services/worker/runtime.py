"""Everything a worker computes with, loaded once: model, text, KV pages, store, and the identity of the build."""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import psutil
import torch

from kernels.arithmetic import Arithmetic
from kvstore.identities import IdentityRecord, record_of, remember
from kvstore.place import place_of
from services.engine.batch import Batch
from services.engine.blocks import Blocks
from services.engine.check import Canary
from services.engine.engine import Engine
from services.engine.loading import load_checked
from services.engine.model import Model
from services.engine.pages import PagePool
from services.engine.proof import Proofs
from services.engine.storage import identity_of, open_store
from services.models.files import ModelFiles
from services.models.registry import build_id, resolve, text_id
from services.settings import Settings
from services.text.model import TextModel, load_text
from services.worker.pinned import PinnedPrefixes

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_MEMORY_SHARE = 0.2  # of the machine, for one worker's KV pages, where the settings do not say
IO_THREADS = 4
IDLE_CONTEXTS = 2  # whole contexts of released blocks that may stay resident
CLOSE_WAIT_S = 1.0  # for calls of the store: a write takes some 10 ms, one that hangs is left behind


def set_threads(settings: Settings) -> None:
    """One compute thread for each core that this process owns, unless the settings say otherwise."""
    torch.set_num_threads(settings.compute.threads or len(os.sched_getaffinity(0)))


class Prepared(NamedTuple):
    """A model that was found and understood, but not loaded: enough to say what a worker of it will be."""

    files: ModelFiles
    proofs: Proofs
    arithmetic: Arithmetic

    @classmethod
    def of(cls, settings: Settings) -> "Prepared":
        """The first time this downloads and converts. Raises `SetupError`."""
        files = resolve(settings.compute.model, Path(settings.kv.data_dir), log.info)
        proofs = Proofs(files, settings.compute.dtype, settings.kv.quantisation)
        return cls(files, proofs, proofs.arithmetic())

    @property
    def build(self) -> str:
        return build_id(self.files, self.arithmetic.id)

    @property
    def text_id(self) -> str:
        return text_id(self.files)


class Runtime:
    """Made by `load`, or around a model that is loaded already; closed by its maker."""

    def __init__(
        self,
        settings: Settings,
        files: ModelFiles,
        text: TextModel,
        model: Model,
        canary: Canary | None = None,
        trouble: str = "",
    ) -> None:
        """`canary` of the model, to be asked again; `trouble` that it is computed with, for an operator."""
        self.settings = settings
        self.text = text
        self.build = build_id(files, model.arithmetic.id)
        self.text_id = text_id(files)
        self.pool = _make_pool(model, settings)
        self.engine = Engine(model, self.pool)
        self.canary = canary
        self._trouble = trouble
        identity = identity_of(files, model, settings.kv.block_tokens)
        self._copier = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store-copies")
        self.store = open_store(settings.kv, identity, model, self._copier)
        self.place = place_of(Path(settings.kv.data_dir) / "kv")
        self._io = ThreadPoolExecutor(max_workers=IO_THREADS, thread_name_prefix="store")
        self.blocks = Blocks(
            self.store,
            identity,
            self.pool,
            self._io,
            ttl_s=settings.kv.ttl_s,
            partial_ttl_s=settings.kv.partial_ttl_s,
            fetch_budget_s=settings.kv.fetch_budget_s,
            recompute=self.engine.prefill_rate,
        )
        root = Path(settings.kv.data_dir) / "kv"
        self.pinned = PinnedPrefixes(root, identity, self.store, text)
        self.pinned.refresh()
        self.blocks.shared = self.pinned.shared
        _remember(root, record_of(identity, files.slug, self.build, model.arithmetic.name))

    @classmethod
    def load(cls, settings: Settings, prepared: Prepared) -> "Runtime":
        """Loads and checks the model; seconds. Raises `SetupError`."""
        started_s = time.monotonic()
        files = prepared.files
        model, canary, trouble = load_checked(files, prepared.arithmetic, prepared.proofs.check)
        runtime = cls(settings, files, load_text(files), model, canary, trouble)
        log.info(
            "model %s, build %s, %d KV pages of %d tokens, loaded in %.1f s",
            files.slug,
            runtime.build,
            runtime.pool.num_pages,
            runtime.pool.block_tokens,
            time.monotonic() - started_s,
        )
        return runtime

    @property
    def troubles(self) -> list[str]:
        """What does not work as it should, for people to read."""
        return [*([self._trouble] if self._trouble else []), *self.store.troubles]

    @property
    def context_pages(self) -> int:
        """Pages of a sequence that fills the model's context."""
        return self.pages_for(self.text.context_tokens)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_tokens)

    async def on_store_thread(self, call: Callable[[], T]) -> T:
        """What may wait for a disk, away from the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._io, call)

    def batch(self, *, chunk_tokens: int, token_budget: int) -> Batch:
        return Batch(self.engine, chunk_tokens=chunk_tokens, token_budget=token_budget)

    def close(self) -> None:
        """Waits for the pass under way, and shortly for calls of the store. One that hangs keeps its thread, and the
        interpreter from ending: see `services.worker.grace`."""
        self.engine.close()
        ending = threading.Thread(target=self._end_store_calls, daemon=True)
        ending.start()
        ending.join(CLOSE_WAIT_S)
        if ending.is_alive():
            log.warning("the store hangs: left without it")
            return
        for tier in self.store.tiers:
            tier.close()

    def _end_store_calls(self) -> None:
        """Waits for those that run; what waits for its turn is not made."""
        for threads in (self._io, self._copier):
            threads.shutdown(cancel_futures=True)


def _remember(root: Path, record: IdentityRecord) -> None:
    """Only an operator's tools miss it."""
    try:
        remember(root, record)
    except OSError as error:
        log.warning("cannot note in the store who uses it: %s", error)


def _make_pool(model: Model, settings: Settings) -> PagePool:
    """Pages for `max_sequences` whole contexts if memory allows, and never fewer than for one."""
    block_tokens = settings.kv.block_tokens
    context_pages = -(-model.config.context_tokens // block_tokens)
    page_bytes = model.kv_bytes_per_token * block_tokens
    budget = settings.scheduler.kv_memory_bytes or int(psutil.virtual_memory().total * MAX_MEMORY_SHARE)
    num_pages = min(settings.scheduler.max_sequences * context_pages, budget // page_bytes)
    return PagePool(
        max(num_pages, context_pages),
        model.page_form(block_tokens),
        max_idle=IDLE_CONTEXTS * context_pages,
    )
