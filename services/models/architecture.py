"""Which models kvrelay can serve, told from their config alone. Everything else is refused with the setting named."""

from collections.abc import Mapping
from typing import Any

from schemas.errors import SetupError

SUPPORTED_TYPES = ("llama", "mistral")
# Rotary scalings that leave a position's rotation a function of the position alone, with the numbers each needs.
_ROPE_NUMBERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}

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
# Below, the exact recipes of the kernels do not hold.
_MULTIPLES_OF_16 = ("head_dim", "hidden_size", "intermediate_size")


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
    partial = "partial_rotary_factor"
    if config.get(partial, 1) != 1:
        raise _unsupported(where, partial, config[partial], "partial rotation")
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name) or {}
        if not isinstance(rope, dict):
            raise SetupError(f"{where}: {name} must be an object, got {rope!r:.80}")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in _ROPE_NUMBERS:
            raise _unsupported(where, f"{name}.rope_type", kind, "rotary embeddings that depend on the prompt's length")
        if rope.get(partial, 1) != 1:
            raise _unsupported(where, f"{name}.{partial}", rope[partial], "partial rotation")
        for number in _ROPE_NUMBERS[kind]:
            if not isinstance(rope.get(number), (int, float)):
                raise SetupError(f"{where}: {name}.{number} must be a number, got {rope.get(number)!r:.80}")


def _check_sizes(config: Mapping[str, Any], where: str) -> None:
    for name in _SIZES:
        value = config.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise SetupError(f"{where}: {name} must be a positive number, got {value!r}")
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads") or config["num_attention_heads"]
    if not isinstance(kv_heads, int) or kv_heads <= 0 or heads % kv_heads:
        raise SetupError(f"{where}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads!r}")
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    for name, value in {**config, "head_dim": head_dim}.items():
        if name in _MULTIPLES_OF_16 and (not isinstance(value, int) or value <= 0 or value % 16):
            raise SetupError(f"{where}: {name} must be a multiple of 16, got {value!r:.80}")


def _unsupported(where: str, setting: str, value: Any, meaning: str) -> SetupError:
    return SetupError(f"{where}: {setting}={value!r} ({meaning}) is not supported: choose another model")
