"""The store as a model sees it: which blocks are ours, how large they are, where they lie."""

from concurrent.futures import Executor
from pathlib import Path

from kernels.arithmetic import Arithmetic
from kvstore.codec import codec_named
from kvstore.geometry import Geometry
from kvstore.guarded import GuardedTier
from kvstore.keys import Identity, check_key_constant
from kvstore.nvme import NvmeTier
from kvstore.redis.tier import RedisTier
from kvstore.store import KVStore
from kvstore.tier import Tier
from schemas.blob import MIN_BLOCK_TOKENS, ElementType, Quantisation
from services.config import redis_url
from services.engine.model import Model
from services.models.files import ModelFiles
from services.settings import Kv


def identity_of(files: ModelFiles, model: Model, block_tokens: int, arithmetic: Arithmetic | None = None) -> Identity:
    """What a block must agree with before its bytes mean anything to `model`, or to one of another `arithmetic`."""
    geometry = geometry_of(model, arithmetic)
    return Identity(
        fingerprint=files.fingerprint,
        tokenizer_hash=files.tokenizer_hash,
        arithmetic=(arithmetic or model.arithmetic).id,
        dtype=geometry.dtype,
        block_tokens=block_tokens,
        quantisation=geometry.quantisation,
    )


def geometry_of(model: Model, arithmetic: Arithmetic | None = None) -> Geometry:
    """Of the model's blocks in its own arithmetic, or in another one.

    Raises `SetupError` for a model whose K and V cannot be stored so.
    """
    arithmetic = arithmetic or model.arithmetic
    form = model.page_form(MIN_BLOCK_TOKENS, arithmetic)
    # Of what is attended to: a whole number times its scale is one of float32.
    name = "float32" if form.is_quantised else str(form.dtype).removeprefix("torch.")
    quantisation = Quantisation[arithmetic.quantisation.upper()]
    return Geometry(form.layers, form.kv_heads, form.head_dim, ElementType.named(name), quantisation, form.is_quantised)


def open_tiers(settings: Kv) -> list[Tier]:
    """Fastest first, each behind its breaker. Connects to nothing. Raises `SetupError`. The caller closes them."""
    tiers: list[Tier] = [GuardedTier(NvmeTier(Path(settings.data_dir) / "kv", settings.max_bytes))]
    if url := redis_url(settings):
        redis = RedisTier(url, is_cluster=settings.redis_cluster, timeout_s=settings.redis_timeout_s)
        tiers.append(GuardedTier(redis))
    return tiers


def open_store(settings: Kv, identity: Identity, model: Model, copier: Executor | None = None) -> KVStore:
    """The store of `settings`. Raises `SetupError` if keys or shapes cannot be trusted.

    The caller closes its tiers, and `copier`, whose thread brings blocks from one tier to another.
    """
    check_key_constant()
    return KVStore(open_tiers(settings), identity, geometry_of(model), codec_named(settings.codec), copier=copier)


def beside(store: KVStore, codec: str, identity: Identity, geometry: Geometry) -> KVStore:
    """The blocks of another identity in the tiers of `store`, to be read."""
    return KVStore(store.tiers, identity, geometry, codec_named(codec))
