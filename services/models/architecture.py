"""Which models kvrelay can serve, and the numbers that shape one, told from its config alone.

Everything else is refused with the setting named, before weights are downloaded or read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from kernels.rope_scaling import RopeScaling
from schemas.errors import SetupError
from services.models.family import FAMILIES
from services.models.refusal import unsupported
from services.models.rope_config import rope_of

# Settings of other structures: present with a true value, they change the forward pass or the shape of the KV.
_FOREIGN = {
    "num_local_experts": "mixture of experts",
    "num_experts": "mixture of experts",
    "n_routed_experts": "mixture of experts",
    "kv_lora_rank": "multi-head latent attention",
    "state_size": "state-space layers",
    "ssm_cfg": "state-space layers",
    "mamba_d_state": "state-space layers",
    "attn_logit_softcapping": "logit soft-capping",
    "final_logit_softcapping": "logit soft-capping",
    "attention_chunk_size": "chunked attention",
    "no_rope_layers": "layers without rotation",
}
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
MAX_LAYERS = 1024  # no model has so many; a damaged config must not cost memory before it is noticed
# Below, the exact recipes of the kernels do not hold.
_MULTIPLES_OF_16 = ("head_dim", "hidden_size", "intermediate_size")


@dataclass(frozen=True)
class Architecture:
    """`fused` and `head_norms` as in `Family`."""

    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_tokens: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    tied_head: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    fused: bool
    head_norms: bool

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], where: str = "the model") -> Self:
        """`config`: a Hugging Face config.json, `where` says whose it is.

        Raises `SetupError` naming the setting of a model whose forward pass this is not, or whose KV cannot be cut at a
        position.
        """
        kind = config.get("model_type")
        if kind not in FAMILIES:
            raise SetupError(f"{where}: model_type {kind!r:.80} is not supported, only {', '.join(FAMILIES)}")
        family = FAMILIES[kind]
        config = {**family.defaults, **config}
        _refuse_foreign(config, where)
        heads, kv_heads, head_dim = _check_sizes(config, where)
        theta, scaling = rope_of(config, family.rope_types, where)
        return cls(
            num_layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=config["vocab_size"],
            context_tokens=config["max_position_embeddings"],
            norm_eps=_norm_eps(config.get("rms_norm_eps", 1e-6), where),
            rope_theta=theta,
            rope_scaling=scaling,
            # transformers ties by default, and writes the key only where a model differs from its family.
            tied_head=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=_bias(family.qkv_bias, config),
            out_bias=_bias(family.out_bias, config),
            mlp_bias=_bias(family.mlp_bias, config),
            fused=family.fused,
            head_norms=family.head_norms,
        )


def _norm_eps(value: Any, where: str) -> float:
    if not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise SetupError(f"{where}: rms_norm_eps must be a number from 0 to 1, got {value!r:.80}")
    return float(value)


def _bias(stated: bool | str, config: Mapping[str, Any]) -> bool:
    return stated if isinstance(stated, bool) else bool(config.get(stated, False))


def _refuse_foreign(config: Mapping[str, Any], where: str) -> None:
    for name in ("quantization_config", "compression_config"):
        if settings := config.get(name):
            method = settings.get("quant_method") if isinstance(settings, dict) else settings
            raise unsupported(where, f"{name}.quant_method", method, "quantised safetensors; take a GGUF")
    for name, meaning in _FOREIGN.items():
        if config.get(name):
            raise unsupported(where, name, config[name], meaning)
    window = config.get("sliding_window")
    # A window that holds the whole context is none.
    if (
        window
        and config.get("use_sliding_window", True)
        and not _at_least(window, config.get("max_position_embeddings"))
    ):
        raise unsupported(where, "sliding_window", window, "KV that cannot be cut at a position")
    layers = set(config.get("layer_types") or ()) - {"full_attention"}
    if layers:
        raise unsupported(where, "layer_types", sorted(layers), "layers without full attention")
    if config.get("hidden_act", "silu") != "silu":
        raise unsupported(where, "hidden_act", config["hidden_act"], "an activation other than silu")


def _check_sizes(config: Mapping[str, Any], where: str) -> tuple[int, int, int]:
    """Heads, KV heads, and the dimension of one."""
    for name in _SIZES:
        _check_positive(config.get(name), name, where)
    if config["num_hidden_layers"] > MAX_LAYERS:
        raise SetupError(f"{where}: num_hidden_layers must be at most {MAX_LAYERS}, got {config['num_hidden_layers']}")
    heads = config["num_attention_heads"]
    kv_heads = heads if config.get("num_key_value_heads") is None else config["num_key_value_heads"]
    _check_positive(kv_heads, "num_key_value_heads", where)
    if heads % kv_heads:
        raise SetupError(f"{where}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads!r}")
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    for name, value in {**config, "head_dim": head_dim}.items():
        if name in _MULTIPLES_OF_16 and (not isinstance(value, int) or value <= 0 or value % 16):
            raise SetupError(f"{where}: {name} must be a multiple of 16, got {value!r:.80}")
    return heads, kv_heads, head_dim


def _check_positive(value: Any, name: str, where: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise SetupError(f"{where}: {name} must be a positive number, got {value!r:.80}")


def _at_least(window: Any, context: Any) -> bool:
    return isinstance(window, int) and isinstance(context, int) and window >= context
