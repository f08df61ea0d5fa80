"""A Llama-family GGUF as a Hugging Face folder: config, float32 weights in Hugging Face's names and row order."""

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schemas.errors import SetupError
from services.models.gguf_file import GgufFile, GgufTensor
from services.models.safetensors_file import write_float32

if TYPE_CHECKING:
    import numpy

_REQUIRED = object()
_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


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


def write_weights(gguf: GgufFile, config: dict[str, Any], to: Path) -> None:
    """Dequantises tensor by tensor into one safetensors file.

    Raises `SetupError` for tensors that are missing, unknown or of the wrong shape.
    """
    plan = _plan(gguf, config)
    shapes = {name: tensor.shape for name, tensor in plan.items()}
    with gguf.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        write_float32(to, shapes, _values(plan, config, data))


def _values(plan: dict[str, GgufTensor], config: dict[str, Any], data: mmap.mmap) -> Iterator[memoryview]:
    import numpy

    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in plan.items():
        values = _dequantised(tensor, data)
        num_heads = heads.get(name.split(".")[-2])
        if num_heads:
            values = _rows_in_halves(values, num_heads)
        yield numpy.ascontiguousarray(values).data.cast("B")


def _dequantised(tensor: GgufTensor, data: mmap.mmap) -> "numpy.ndarray[Any, Any]":
    """float32, in the tensor's shape; the blocks' own definition is the `gguf` package's."""
    import numpy
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    raw = numpy.frombuffer(data[tensor.start : tensor.start + tensor.num_bytes], numpy.uint8)
    values: numpy.ndarray[Any, Any] = dequantize(raw, GGMLQuantizationType[tensor.type])
    return values.reshape(tensor.shape)


def _rows_in_halves(weight: "numpy.ndarray[Any, Any]", num_heads: int) -> "numpy.ndarray[Any, Any]":
    """[heads * D, hidden]: from llama.cpp's order of Q and K rows, where a rotated pair is adjacent, to Hugging
    Face's, where its partners are D/2 apart (undoes `permute` of llama.cpp's convert_hf_to_gguf.py)."""
    rows, hidden = weight.shape
    half = rows // num_heads // 2
    return weight.reshape(num_heads, half, 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


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


def _plan(gguf: GgufFile, config: dict[str, Any]) -> dict[str, GgufTensor]:
    """Hugging Face's name -> tensor, all present and of the shape that the config implies."""
    plan: dict[str, GgufTensor] = {}
    for name, tensor in gguf.tensors.items():
        target = _target_name(name)
        if target is None:
            raise SetupError(f"{gguf.path}: tensor {name} does not belong to a Llama model that kvrelay supports")
        plan[target] = tensor
    for name, shape in _expected_shapes(config).items():
        if name not in plan:
            raise SetupError(f"{gguf.path} lacks the tensor for {name}: get it again")
        if plan[name].shape != shape:
            raise SetupError(f"{gguf.path}: {name} has the shape {plan[name].shape}, the config implies {shape}")
    if len(plan) != len(_expected_shapes(config)):
        raise SetupError(f"{gguf.path} has more layers than its llama.block_count says")
    return plan


def _target_name(name: str) -> str | None:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    prefix, _, rest = name.partition(".")
    layer, _, leaf = rest.partition(".")
    if prefix != "blk" or not layer.isdecimal() or leaf not in _LAYER_NAMES:
        return None
    return f"model.layers.{layer}.{_LAYER_NAMES[leaf]}"


def _expected_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q_rows = config["num_attention_heads"] * config["head_dim"]
    kv_rows = config["num_key_value_heads"] * config["head_dim"]
    layer = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_rows, hidden),
        "self_attn.k_proj.weight": (kv_rows, hidden),
        "self_attn.v_proj.weight": (kv_rows, hidden),
        "self_attn.o_proj.weight": (hidden, q_rows),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes
