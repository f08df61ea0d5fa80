"""The tensors of a GGUF under Hugging Face's names, and where llama.cpp keeps their rows in another order."""

from collections.abc import Mapping
from typing import Any

import msgspec

from schemas.errors import SetupError
from services.models.gguf_file import GgufFile, GgufTensor

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
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_KINDS = ("weight", "bias")


class StoredTensor(msgspec.Struct, frozen=True):
    """`paired_heads`: 0, or of how many heads the rows are kept with the two of a rotated pair side by side, as
    llama.cpp has them, instead of half a head apart, as Hugging Face has them."""

    tensor: GgufTensor
    paired_heads: int = 0


def tensors_of(gguf: GgufFile, config: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Hugging Face's name -> tensor. Raises `SetupError` for a tensor that the family does not have."""
    found: dict[str, StoredTensor] = {}
    for name, tensor in gguf.tensors.items():
        target = _target_name(name)
        if target is None:
            raise SetupError(f"{gguf.path}: tensor {name} does not belong to a Llama model that kvrelay supports")
        found[target] = StoredTensor(tensor, _paired_heads(target, config))
    return found


def _target_name(name: str) -> str | None:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    prefix, _, rest = name.partition(".")
    layer, _, rest = rest.partition(".")
    leaf, _, kind = rest.partition(".")
    if prefix != "blk" or not layer.isdecimal() or leaf not in _LAYER_NAMES or kind not in _KINDS:
        return None
    return f"model.layers.{layer}.{_LAYER_NAMES[leaf]}.{kind}"


def _paired_heads(target: str, config: Mapping[str, Any]) -> int:
    """`permute` of llama.cpp's convert_hf_to_gguf.py."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    return int(heads.get(target.split(".")[-2], 0))
