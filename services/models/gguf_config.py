"""What a GGUF's metadata says of its model, as a Hugging Face config."""

from typing import Any

from schemas.errors import SetupError
from services.models.gguf_file import GgufFile, read_floats
from services.models.gguf_tensors import ROPE_FACTORS
from services.models.refusal import unsupported

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_REQUIRED = object()


def config_of(gguf: GgufFile) -> dict[str, Any]:
    """Raises `SetupError` for another architecture and for a structure that we do not compute, naming it."""
    _refuse_parts_and_adapters(gguf)
    kind = gguf.metadata.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise SetupError(
            f"{gguf.path}: general.architecture {kind!r:.80} is not supported, only {', '.join(ARCHITECTURES)}"
        )
    keys = _Keys(gguf, kind)
    heads = keys.get("attention.head_count")
    hidden = keys.get("embedding_length")
    head_dim = keys.get("attention.key_length", hidden // max(heads, 1))
    context = keys.get("context_length")
    _refuse_unsupported(keys, head_dim, context)
    if keys.get("block_count") > len(gguf.tensors):
        raise SetupError(f"{gguf.path}: {kind}.block_count is larger than its number of tensors: get it again")
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": keys.get("feed_forward_length"),
        "num_hidden_layers": keys.get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": keys.get("attention.layer_norm_rms_epsilon", kind=float),
        "rope_theta": keys.get("rope.freq_base", 10000.0, kind=float),
        "max_position_embeddings": context,
        "vocab_size": len(tokens) if isinstance(tokens, list) else keys.get("vocab_size"),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "bos_token_id": gguf.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": gguf.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": gguf.metadata.get("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
        **_biases(gguf, kind),
        **_rope(keys),
    }


def eos_ids_of(gguf: GgufFile) -> tuple[int, ...]:
    """The end-of-sequence and end-of-turn tokens."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return tuple(sorted({gguf.metadata[key] for key in keys if isinstance(gguf.metadata.get(key), int)}))


class _Keys:
    """The metadata of one architecture: `get("block_count")` is that of `llama.block_count`."""

    def __init__(self, gguf: GgufFile, architecture: str) -> None:
        self.gguf = gguf
        self.architecture = architecture

    def name(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def raw(self, key: str) -> Any:
        return self.gguf.metadata.get(self.name(key))

    def get(self, key: str, default: Any = _REQUIRED, kind: type = int) -> Any:
        value = self.gguf.metadata.get(self.name(key), default)
        if value is _REQUIRED:
            raise SetupError(f"{self.gguf.path} lacks {self.name(key)}: get it again")
        if not isinstance(value, kind):
            raise SetupError(f"{self.gguf.path}: {self.name(key)} must be one {kind.__name__}, got {value!r:.80}")
        return value

    def unsupported(self, key: str, meaning: str) -> SetupError:
        return unsupported(str(self.gguf.path), self.name(key), self.raw(key), meaning)


def _refuse_parts_and_adapters(gguf: GgufFile) -> None:
    kind = gguf.metadata.get("general.type", "model")
    if kind == "adapter":
        raise SetupError(
            f"{gguf.path} is a {gguf.metadata.get('adapter.type', 'LoRA')!s:.20} adapter: adapters are not supported, "
            "merge it into its base model (llama-export-lora) and give that file"
        )
    if kind != "model":
        raise SetupError(f"{gguf.path}: general.type {kind!r:.80} is not supported, only a model")
    if gguf.metadata.get("split.count", 0) not in (0, 1):
        raise SetupError(
            f"{gguf.path} is one of several parts: join them (llama-gguf-split --merge) and give the whole"
        )


def _refuse_unsupported(keys: _Keys, head_dim: int, context: int) -> None:
    allowed = {
        "expert_count": (0, None),
        "rope.dimension_count": (head_dim, None),
        "attention.value_length": (head_dim, None),
        "attention.causal": (True, None),
    }
    meanings = {
        "expert_count": "mixture of experts",
        "rope.dimension_count": "partial rotation",
        "attention.value_length": "values of another size than keys",
        "attention.causal": "attention to later tokens",
    }
    for key, values in allowed.items():
        if keys.raw(key) not in values:
            raise keys.unsupported(key, meanings[key])
    window = keys.raw("attention.sliding_window")
    # A window that holds the whole context is none.
    if window and not (isinstance(window, int) and window >= context):
        raise keys.unsupported("attention.sliding_window", "KV that cannot be cut at a position")


def _biases(gguf: GgufFile, kind: str) -> dict[str, bool]:
    """The settings of families whose biases are a matter of settings, where the file has them."""
    found = {}
    if kind in ("llama", "qwen3") and "blk.0.attn_q.bias" in gguf.tensors:
        found["attention_bias"] = True
    if kind == "llama" and "blk.0.ffn_up.bias" in gguf.tensors:
        found["mlp_bias"] = True
    return found


def _rope(keys: _Keys) -> dict[str, Any]:
    """The scaling, in Hugging Face's words; nothing where there is none.

    A list of factors, as llama.cpp writes one for the llama3 scaling, is a longrope whose two lists are the same.
    """
    for name in ("rope_factors_long.weight", "rope_factors_short.weight"):
        if name in keys.gguf.tensors:
            raise SetupError(
                f"{keys.gguf.path}: {name} (rotary embeddings that depend on the prompt's length) is not supported: "
                "choose another model"
            )
    kind, factor = _scaling(keys)
    if ROPE_FACTORS in keys.gguf.tensors:
        if kind != "none":
            raise keys.unsupported("rope.scaling.type", f"a scaling beside {ROPE_FACTORS}")
        factors = read_floats(keys.gguf, ROPE_FACTORS)
        same = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
        return {"rope_scaling": {"rope_type": "longrope", **same}}
    if kind == "none":
        return {}
    if kind == "linear":
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind == "yarn":
        return {"rope_scaling": {"rope_type": "yarn", "factor": factor, **_yarn(keys)}}
    raise keys.unsupported("rope.scaling.type", "rotary embeddings that depend on the prompt's length")


def _scaling(keys: _Keys) -> tuple[str, float]:
    """Type and factor, as llama.cpp takes them: linear where no type is named, none where the factor is 0 or 1."""
    kind = keys.get("rope.scaling.type", "linear", kind=str)
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 0.0, kind=float), kind=float)
    if kind == "linear" and factor in (0.0, 1.0):
        return "none", 1.0
    return kind, factor


def _yarn(keys: _Keys) -> dict[str, Any]:
    neutral = {"attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_log_multiplier": 0.0}
    for key, value in neutral.items():
        if keys.raw(f"rope.scaling.{key}") not in (None, value):
            raise keys.unsupported(f"rope.scaling.{key}", "a yarn of its own")
    optional = {"beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow"}
    return {
        "original_max_position_embeddings": keys.get("rope.scaling.original_context_length"),
        **{name: keys.get(key, kind=float) for name, key in optional.items() if keys.raw(key) is not None},
    }
