"""The store as a model sees it: which blocks are ours, how large they are, where they lie."""

from concurrent.futures import Executor
from pathlib import Path

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


def identity_of(files: ModelFiles, model: Model, block_tokens: int) -> Identity:
    """What a block must agree with before its bytes mean anything to `model`."""
    return Identity(
        fingerprint=files.fingerprint,
        tokenizer_hash=files.tokenizer_hash,
        arithmetic=model.arithmetic.id,
        dtype=_element_type(model),
        block_tokens=block_tokens,
        quantisation=_quantisation(model),
    )


def geometry_of(model: Model) -> Geometry:
    """Raises `SetupError` for a model whose K and V cannot be stored so."""
    form = model.page_form(MIN_BLOCK_TOKENS)
    return Geometry(
        form.layers, form.kv_heads, form.head_dim, _element_type(model), _quantisation(model), form.is_quantised
    )


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


def _element_type(model: Model) -> ElementType:
    """Of what is attended to: a whole number times its scale is one of float32."""
    form = model.page_form(MIN_BLOCK_TOKENS)
    return ElementType.FLOAT32 if form.is_quantised else ElementType.named(str(form.dtype).removeprefix("torch."))


def _quantisation(model: Model) -> Quantisation:
    return Quantisation[model.arithmetic.quantisation.upper()]
