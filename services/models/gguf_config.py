"""What a GGUF's metadata says of its model, as a Hugging Face config."""

from typing import Any

from schemas.errors import SetupError
from services.models.gguf_file import GgufFile

_REQUIRED = object()


def config_of(gguf: GgufFile) -> dict[str, Any]:
    """Hugging Face's config. Raises `SetupError` for another architecture, naming it."""
    architecture = gguf.metadata.get("general.architecture")
    if architecture != "llama":
        raise SetupError(f"{gguf.path}: general.architecture {architecture!r} is not supported, only 'llama'")
    heads = _get(gguf, "llama.attention.head_count")
    hidden = _get(gguf, "llama.embedding_length")
    head_dim = _get(gguf, "llama.attention.key_length", hidden // max(heads, 1))
    _refuse_unsupported(gguf, head_dim)
    if _get(gguf, "llama.block_count") > len(gguf.tensors):
        raise SetupError(f"{gguf.path}: llama.block_count is larger than its number of tensors: get it again")
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": _get(gguf, "llama.feed_forward_length"),
        "num_hidden_layers": _get(gguf, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _get(gguf, "llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": _get(gguf, "llama.attention.layer_norm_rms_epsilon", kind=float),
        "rope_theta": _get(gguf, "llama.rope.freq_base", 10000.0, kind=float),
        "max_position_embeddings": _get(gguf, "llama.context_length"),
        "vocab_size": len(tokens) if isinstance(tokens, list) else _get(gguf, "llama.vocab_size"),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "bos_token_id": gguf.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": gguf.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": gguf.metadata.get("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
    }


def eos_ids_of(gguf: GgufFile) -> tuple[int, ...]:
    """The end-of-sequence and end-of-turn tokens."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return tuple(sorted({gguf.metadata[key] for key in keys if isinstance(gguf.metadata.get(key), int)}))


def _get(gguf: GgufFile, key: str, default: Any = _REQUIRED, kind: type = int) -> Any:
    value = gguf.metadata.get(key, default)
    if value is _REQUIRED:
        raise SetupError(f"{gguf.path} lacks {key}: get it again")
    if not isinstance(value, kind):
        raise SetupError(f"{gguf.path}: {key} must be one {kind.__name__}, got {value!r:.80}")
    return value


def _refuse_unsupported(gguf: GgufFile, head_dim: int) -> None:
    wanted = {
        "llama.expert_count": (0, None),
        "llama.attention.sliding_window": (0, None),
        "llama.rope.scaling.type": ("none", None),
        "llama.rope.dimension_count": (head_dim, None),
        "llama.attention.value_length": (head_dim, None),
    }
    for key, allowed in wanted.items():
        if gguf.metadata.get(key) not in allowed:
            raise SetupError(f"{gguf.path}: {key}={gguf.metadata[key]!r:.80} is not supported: choose another model")
    if "rope_freqs.weight" in gguf.tensors:
        raise SetupError(f"{gguf.path}: rope_freqs.weight (scaled rotary embeddings) is not supported")
