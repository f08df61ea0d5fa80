"""The numbers that shape a Llama forward pass, read from a Hugging Face config."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kernels.arithmetic import Shapes
from kernels.reference.rope import RopeScaling
from schemas.errors import SetupError


@dataclass(frozen=True)
class ModelConfig:
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
    attention_bias: bool
    mlp_bias: bool

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Raises `SetupError` naming the setting of a model whose forward pass this is not, or whose KV cannot be
        cut at a position."""
        _refuse_foreign(config)
        heads = config["num_attention_heads"]
        return cls(
            num_layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab_size=config["vocab_size"],
            context_tokens=config["max_position_embeddings"],
            norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=_rope(config).get("rope_theta", config.get("rope_theta", 10000.0)),
            rope_scaling=_rope_scaling(config),
            # transformers ties by default, and writes the key only where a model differs from its family.
            tied_head=config.get("tie_word_embeddings", False),
            attention_bias=config.get("attention_bias", False),
            mlp_bias=config.get("mlp_bias", False),
        )

    @property
    def qkv_rows(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def shapes(self) -> Shapes:
        return Shapes(
            linears=(
                (self.qkv_rows, self.hidden),
                (self.hidden, self.num_heads * self.head_dim),
                (2 * self.intermediate, self.hidden),
                (self.hidden, self.intermediate),
            ),
            head=(self.vocab_size, self.hidden),
            heads=self.num_heads,
            kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
        )


_LLAMA_TYPES = ("llama", "mistral")


def _refuse_foreign(config: Mapping[str, Any]) -> None:
    if config.get("model_type", "llama") not in _LLAMA_TYPES:
        raise _unsupported("model_type", config["model_type"], f"of the Llama family, which are {_LLAMA_TYPES}")
    if config.get("hidden_act", "silu") != "silu":
        raise _unsupported("hidden_act", config["hidden_act"], "with silu")
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        raise _unsupported("sliding_window", config["sliding_window"], "without a sliding window")
    if set(config.get("layer_types") or ()) - {"full_attention"}:
        raise _unsupported("layer_types", config["layer_types"], "with full attention in every layer")
    if _rope(config).get("partial_rotary_factor", config.get("partial_rotary_factor", 1)) != 1:
        raise _unsupported("partial_rotary_factor", "< 1", "that rotates whole heads")
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if head_dim % 16 or config["hidden_size"] % 16 or config["intermediate_size"] % 16:
        raise _unsupported("head_dim, hidden_size, intermediate_size", "odd sizes", "with multiples of 16")


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """transformers 5 writes `rope_parameters`, earlier versions `rope_scaling` and a `rope_theta` beside it."""
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _rope_scaling(config: Mapping[str, Any]) -> RopeScaling:
    rope = _rope(config)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling(kind="linear", factor=rope["factor"])
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=rope["factor"],
            low_freq_factor=rope["low_freq_factor"],
            high_freq_factor=rope["high_freq_factor"],
            original_context=rope["original_max_position_embeddings"],
        )
    raise _unsupported("rope_type", kind, "with default, linear or llama3 rotary scaling")


def _unsupported(setting: str, value: object, wanted: str) -> SetupError:
    return SetupError(f"the model's {setting} is {value!r}: choose a model {wanted}")
