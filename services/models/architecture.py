"""Which models kvrelay can serve, told from their config alone. Everything else is refused with the setting named."""

from collections.abc import Mapping
from typing import Any

from schemas.errors import SetupError

SUPPORTED_TYPES = ("llama", "mistral")
SUPPORTED_ROPE_TYPES = ("default",)

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
    "quantization_config": "quantised safetensors",
    "attention_bias": "attention biases",
    "mlp_bias": "MLP biases",
    "attention_chunk_size": "chunked attention",
}
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)


def check_supported(config: Mapping[str, Any], where: str) -> None:
    """`config`: a Hugging Face config.json. Raises `SetupError` that names the setting; `where` says whose it is."""
    kind = config.get("model_type")
    if kind not in SUPPORTED_TYPES:
        raise SetupError(f"{where}: model_type {kind!r} is not supported, only {', '.join(SUPPORTED_TYPES)}")
    for name, meaning in _FOREIGN.items():
        if config.get(name):
            raise _unsupported(where, name, config[name], meaning)
    window = config.get("sliding_window")
    if window and config.get("use_sliding_window", True):
        raise _unsupported(where, "sliding_window", window, "KV that cannot be cut at a position")
    layers = set(config.get("layer_types") or ()) - {"full_attention"}
    if layers:
        raise _unsupported(where, "layer_types", sorted(layers), "layers without full attention")
    _check_rope(config, where)
    if config.get("hidden_act", "silu") != "silu":
        raise _unsupported(where, "hidden_act", config["hidden_act"], "an activation other than silu")
    _check_sizes(config, where)


def _check_rope(config: Mapping[str, Any], where: str) -> None:
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name)
        if not rope:
            continue
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
        if kind not in SUPPORTED_ROPE_TYPES:
            raise _unsupported(where, f"{name}.rope_type", kind, "scaled rotary embeddings")
        if isinstance(rope, dict) and rope.get("partial_rotary_factor", 1) != 1:
            raise _unsupported(
                where, f"{name}.partial_rotary_factor", rope["partial_rotary_factor"], "partial rotation"
            )
    if config.get("partial_rotary_factor", 1) != 1:
        raise _unsupported(where, "partial_rotary_factor", config["partial_rotary_factor"], "partial rotation")


def _check_sizes(config: Mapping[str, Any], where: str) -> None:
    for name in _SIZES:
        value = config.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise SetupError(f"{where}: {name} must be a positive number, got {value!r}")
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads") or config["num_attention_heads"]
    if not isinstance(kv_heads, int) or kv_heads <= 0 or heads % kv_heads:
        raise SetupError(f"{where}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads!r}")
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    if not isinstance(head_dim, int) or head_dim <= 0 or head_dim % 2:
        raise SetupError(f"{where}: head_dim must be a positive even number, got {head_dim!r}")


def _unsupported(where: str, setting: str, value: Any, meaning: str) -> SetupError:
    return SetupError(f"{where}: {setting}={value!r} ({meaning}) is not supported: choose another model")
