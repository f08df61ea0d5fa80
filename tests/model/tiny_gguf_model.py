"""A small `transformers` model as a GGUF file, by the names and the row order that llama.cpp's converter gives."""

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from transformers import PreTrainedModel

from services.models.gguf_config import config_of
from services.models.gguf_file import read_gguf
from tests.model.tiny import TinyFiles

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}


def save_gguf(path: Path, model: PreTrainedModel, kind: Type, extra: dict[str, Any] | None = None) -> TinyFiles:
    """Weights of products in `kind`, which `model` has afterwards too, dequantised; others in float32.

    `extra`: metadata without its prefix; a number, a string, or "rope_freqs": a list.
    """
    config = model.config
    arch = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _write_metadata(writer, config, dict(extra or {}))
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    for name, values in state.items():
        stored_as = kind if values.ndim == 2 else Type.F32
        raw = gguf.quants.quantize(values, stored_as)
        state[name] = gguf.quants.dequantize(raw, stored_as)
        rows = gguf.quants.quantize(_permuted(name, values, config), stored_as)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), rows, raw_dtype=stored_as)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model.load_state_dict({name: torch.from_numpy(values) for name, values in state.items()}, strict=False)
    model.tie_weights()
    return TinyFiles(config_of(read_gguf(path)), (path,))


def llama3_factors(head_dim: int, scaling: dict[str, Any]) -> list[float]:
    """`rope_freqs.weight`, as LlamaModel.generate_extra_tensors of convert_hf_to_gguf.py makes it."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    context, found = scaling["original_max_position_embeddings"], []
    for i in range(0, head_dim, 2):
        wavelen = 2 * math.pi * scaling["rope_theta"] ** (i / head_dim)
        if wavelen < context / high:
            found.append(1.0)
        elif wavelen > context / low:
            found.append(factor)
        else:
            smooth = (context / wavelen - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return found


def _permuted(name: str, values: Any, config: Any) -> Any:
    """`permute` of LlamaModel there."""
    leaf = name.split(".")[-2]
    if config.model_type not in ("llama", "mistral") or leaf not in ("q_proj", "k_proj"):
        return values
    heads = config.num_attention_heads if leaf == "q_proj" else config.num_key_value_heads
    paired = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:]).swapaxes(1, 2)
    return np.ascontiguousarray(paired).reshape(values.shape)


def _write_metadata(writer: gguf.GGUFWriter, config: Any, extra: dict[str, Any]) -> None:
    if factors := extra.pop("rope_freqs", None):
        writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    writer.add_vocab_size(config.vocab_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for key, value in extra.items():
        add = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}[type(value)]
        add(f"{writer.arch}.{key}", value)
