"""Everything a worker computes with, loaded once: model, text, KV pages, store, and the identity of the build."""

import asyncio
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import psutil
import torch

from kernels.arithmetic import Arithmetic
from kvstore.converted import ConvertedStore
from kvstore.identities import IdentityRecord, record_of, remember
from kvstore.keys import Identity
from kvstore.place import place_of
from kvstore.store import KVStore
from schemas.beat import ProcessRole
from schemas.errors import SetupError
from services.engine.arithmetics import Arithmetics
from services.engine.batch import Batch
from services.engine.blocks import Blocks, BlockStore
from services.engine.check import Canary
from services.engine.engine import Engine
from services.engine.loading import load_checked, load_model
from services.engine.model import Model
from services.engine.pages import PagePool
from services.engine.proof import Proofs
from services.engine.storage import beside, geometry_of, identity_of, open_store
from services.models.compute_dtype import concrete_dtype
from services.models.files import ModelFiles
from services.models.registry import resolve, text_id
from services.settings import Settings, parse_cores
from services.text.model import TextModel, load_text
from services.worker.cores import SharedCores, share_cores
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
    arithmetics: Arithmetics

    @classmethod
    def of(cls, settings: Settings, role: ProcessRole) -> "Prepared":
        """The first time this downloads and converts. Raises `SetupError`."""
        files = resolve(settings.compute.model, Path(settings.kv.data_dir), log.info)
        compute = settings.compute
        prefill = concrete_dtype(compute.prefill_dtype or compute.dtype, files)
        decode = concrete_dtype(compute.dtype, files)
        if role == "both" and prefill != decode:
            raise SetupError(
                f"a worker for both stages has one arithmetic, not {prefill} and {decode}: leave compute.prefill_dtype "
                "empty, or run workers of single stages",
                param="compute.prefill_dtype",
            )
        proofs = {dtype: Proofs(files, dtype, settings.kv.quantisation) for dtype in (prefill, decode)}
        found = {dtype: of_dtype.arithmetic() for dtype, of_dtype in proofs.items()}
        own = prefill if role == "prefill" else decode
        return cls(files, proofs[own], found[own], Arithmetics(found[prefill], found[decode]))

    @property
    def build(self) -> str:
        return self.arithmetics.build_of(self.files)

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
        arithmetics: Arithmetics | None = None,
        canary: Canary | None = None,
        trouble: str = "",
    ) -> None:
        """`arithmetics` of the build; None: the model's own for both stages. `canary` of the model, to be asked again;
        `trouble` that it is computed with, for an operator."""
        self.settings = settings
        self.text = text
        self.arithmetics = arithmetics = arithmetics or Arithmetics.one(model.arithmetic)
        self.build = arithmetics.build_of(files)
        self.text_id = text_id(files)
        self.pool = _make_pool(model, settings)
        self._cores = _shared_cores(settings, model)
        self.engine = Engine(model, self.pool, self._cores)
        self.canary = canary
        self._trouble = trouble
        identity = identity_of(files, model, settings.kv.block_tokens)
        self._copier = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store-copies")
        self.store = open_store(settings.kv, identity, model, self._copier)
        self.place = place_of(Path(settings.kv.data_dir) / "kv")
        self._io = ThreadPoolExecutor(max_workers=IO_THREADS, thread_name_prefix="store")
        self.blocks = self._blocks(self.store, identity)
        # Of prompts: other ones than its own where decode has an arithmetic of its own.
        self.prompt_blocks, self.prompt_store, prompt_identity = self.blocks, self.store, identity
        if arithmetics.is_mixed and model.arithmetic.id == arithmetics.decode.id:
            prompt_identity = identity_of(files, model, settings.kv.block_tokens, arithmetics.prefill)
            geometry = geometry_of(model, arithmetics.prefill)
            self.prompt_store = beside(self.store, settings.kv.codec, prompt_identity, geometry)
            reader = ConvertedStore(self.prompt_store, geometry, geometry_of(model))
            self.prompt_blocks = self._blocks(reader, prompt_identity)
        root = Path(settings.kv.data_dir) / "kv"
        self.pinned = PinnedPrefixes(root, prompt_identity, self.prompt_store, text)
        self.pinned.refresh()
        self.prompt_blocks.shared = self.pinned.shared
        _remember(root, record_of(identity, files.slug, self.build, model.arithmetic.name))

    def _blocks(self, store: BlockStore, identity: Identity) -> Blocks:
        kv = self.settings.kv
        return Blocks(
            store,
            identity,
            self.pool,
            self._io,
            ttl_s=kv.ttl_s,
            partial_ttl_s=kv.partial_ttl_s,
            fetch_budget_s=kv.fetch_budget_s,
            recompute=self.engine.prefill_rate,
        )

    @classmethod
    def load(cls, settings: Settings, prepared: Prepared) -> "Runtime":
        """Loads and checks the model; seconds. Raises `SetupError`."""
        started_s = time.monotonic()
        files = prepared.files
        load = partial(load_model, lent=_neighbours(settings) or ())
        model, canary, trouble = load_checked(files, prepared.arithmetic, prepared.proofs.check, load)
        files.check_unchanged()
        runtime = cls(settings, files, load_text(files), model, prepared.arithmetics, canary, trouble)
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
    def other_stores(self) -> list[KVStore]:
        """Those that are read beside `store`, in the same tiers."""
        return [] if self.prompt_store is self.store else [self.prompt_store]

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

    def batch(self, *, chunk_tokens: int, token_budget: int, slice_s: float = math.inf, max_draft: int = 0) -> Batch:
        return Batch(
            self.engine, chunk_tokens=chunk_tokens, token_budget=token_budget, slice_s=slice_s, max_draft=max_draft
        )

    def close(self) -> None:
        """Waits for the pass under way, and shortly for calls of the store. One that hangs keeps its thread, and the
        interpreter from ending: see `services.worker.grace`."""
        self.engine.close()
        if self._cores is not None:
            self._cores.close()
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


def _neighbours(settings: Settings) -> list[int] | None:
    """The cores that may be lent to this worker; None if it has a fixed number of threads, or lends none either."""
    compute = settings.compute
    if compute.threads or compute.neighbours in ("", "none") or not hasattr(os, "sched_getaffinity"):
        return None
    own = os.sched_getaffinity(0)
    return [core for core in parse_cores(compute.neighbours) if core not in own]


def _shared_cores(settings: Settings, model: Model) -> SharedCores | None:
    neighbours = _neighbours(settings)
    if neighbours is None:
        return None
    wanted = neighbours if model.borrows else []
    return share_cores(settings.kv.data_dir, sorted(os.sched_getaffinity(0)), wanted)


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
