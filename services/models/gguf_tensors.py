"""The tensors of a GGUF under Hugging Face's names, and where llama.cpp keeps their rows in another order."""

from collections.abc import Mapping
from typing import Any

import msgspec

from schemas.errors import SetupError
from services.models.architecture import Architecture
from services.models.family import FAMILIES
from services.models.gguf_file import GgufFile, GgufTensor
from services.models.weight_layout import layout_of, shapes_of

ROPE_FACTORS = "rope_freqs.weight"  # no weight of a product: `gguf_config` reads it
_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FUSED_NAMES = {**_LAYER_NAMES, "ffn_up": "mlp.gate_up_proj"}
_KINDS = ("weight", "bias")


class StoredTensor(msgspec.Struct, frozen=True):
    """`paired_heads`: 0, or of how many heads the rows are kept with the two of a rotated pair side by side, as
    llama.cpp has them for Llama, instead of half a head apart, as Hugging Face has them."""

    tensor: GgufTensor
    paired_heads: int = 0


def tensors_of(gguf: GgufFile, config: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Hugging Face's name -> tensor: all that the config implies, each of the shape that it implies, and no others.

    Raises `SetupError` otherwise.
    """
    architecture = Architecture.from_hf(config, str(gguf.path))
    names = _FUSED_NAMES if FAMILIES[config["model_type"]].fused else _LAYER_NAMES
    found: dict[str, StoredTensor] = {}
    for name, tensor in gguf.tensors.items():
        if name != ROPE_FACTORS:
            target = _target_name(name, names)
            found[target] = StoredTensor(tensor, _paired_heads(target, config["model_type"], architecture))
    _check(gguf, found, shapes_of(architecture))
    return found


def product_formats(tensors: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> list[str]:
    """Of the weights of all products and of the embedding, each once, sorted."""
    layout = layout_of(Architecture.from_hf(config))
    names = [part.name for product in layout.products() for part in product.weight]
    return sorted({tensors[name].tensor.type for name in names})


def _check(gguf: GgufFile, found: dict[str, StoredTensor], shapes: dict[str, tuple[int, ...]]) -> None:
    for name, shape in shapes.items():
        if name not in found:
            raise SetupError(f"{gguf.path} lacks the tensor for {name}: get it again")
        if found[name].tensor.shape != shape:
            raise SetupError(
                f"{gguf.path}: {name} has the shape {found[name].tensor.shape}, the config implies {shape}"
            )
    if others := [stored.tensor.name for name, stored in found.items() if name not in shapes]:
        raise SetupError(f"{gguf.path}: tensor {others[0]} does not belong to the model that its metadata describes")


def _target_name(name: str, names: Mapping[str, str]) -> str:
    """What Hugging Face calls it; the name itself where that is unknown."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    prefix, _, rest = name.partition(".")
    layer, _, rest = rest.partition(".")
    leaf, _, kind = rest.partition(".")
    if prefix != "blk" or not layer.isdecimal() or leaf not in names or kind not in _KINDS:
        return name
    return f"model.layers.{layer}.{names[leaf]}.{kind}"


def _paired_heads(target: str, kind: str, architecture: Architecture) -> int:
    """`permute` of llama.cpp's convert_hf_to_gguf.py, which only Llama's converter calls: weights and biases."""
    heads = {"q_proj": architecture.num_heads, "k_proj": architecture.num_kv_heads} if kind == "llama" else {}
    return heads.get(target.split(".")[-2], 0) if "." in target else 0
