"""What a model_type means beyond the numbers of its config: one row a family, after `transformers`' own modelling."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """Biases are there, not there, or as the setting of that name says. `fused`: Q, K and V are one tensor, gate and up
    another. `head_norms`: every head of Q and K is normalised before it is rotated.

    `defaults`: what `transformers` assumes of settings that a config leaves out. `rope_types`: None for any.
    """

    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    fused: bool = False
    head_norms: bool = False
    rope_types: tuple[str, ...] | None = None
    defaults: dict[str, Any] = field(default_factory=dict)


FAMILIES = {
    "llama": Family(qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": Family(defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "phi3": Family(
        fused=True,
        # "su" and "yarn" are what its first checkpoints call longrope.
        rope_types=("default", "longrope", "su", "yarn"),
        defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    ),
    "qwen2": Family(qkv_bias=True, defaults={"num_key_value_heads": 32, "use_sliding_window": False}),
    "qwen3": Family(
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        head_norms=True,
        defaults={"num_key_value_heads": 32, "head_dim": 128, "use_sliding_window": False},
    ),
}
