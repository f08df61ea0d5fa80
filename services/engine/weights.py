"""A Llama model's weights, by their Hugging Face names, fused and laid out for an arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernels.arithmetic import Arithmetic
from kernels.linear import Linear
from schemas.errors import SetupError
from services.engine.model_config import ModelConfig


@dataclass(frozen=True)
class Layer:
    attention_norm: Tensor
    qkv: Linear
    attention_out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class Weights:
    """`embedding: [V, hidden]` in the arithmetic's dtype; norms float32."""

    embedding: Tensor
    layers: list[Layer]
    norm: Tensor
    head: Linear


def load_weights(files: Sequence[Path], config: ModelConfig, arithmetic: Arithmetic) -> Weights:
    """Raises `SetupError` for a file that cannot be read and for a tensor that is missing or of the wrong shape."""
    with TensorFiles(files) as tensors:
        embedding = tensors.read("model.embed_tokens.weight", config.vocab_size, config.hidden)
        head = embedding if config.tied_head else tensors.read("lm_head.weight", config.vocab_size, config.hidden)
        return Weights(
            embedding=embedding.to(arithmetic.dtype),
            layers=[_layer(tensors, f"model.layers.{i}.", config, arithmetic) for i in range(config.num_layers)],
            norm=_norm(tensors, "model.norm.weight", config, arithmetic),
            head=arithmetic.head(head),
        )


def _layer(tensors: "TensorFiles", prefix: str, config: ModelConfig, arithmetic: Arithmetic) -> Layer:
    hidden, inner = config.hidden, config.intermediate
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def linear(parts: dict[str, int], inputs: int, has_bias: bool) -> Linear:
        """One product of several projections of the same input, `parts`: name -> outputs."""
        weights = [tensors.read(f"{prefix}{name}.weight", outputs, inputs) for name, outputs in parts.items()]
        biases = [tensors.read(f"{prefix}{name}.bias", outputs) for name, outputs in parts.items() if has_bias]
        return arithmetic.linear(torch.cat(weights), torch.cat(biases) if biases else None)

    attention = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
    return Layer(
        attention_norm=_norm(tensors, f"{prefix}input_layernorm.weight", config, arithmetic),
        qkv=linear(attention, hidden, config.attention_bias),
        attention_out=linear({"self_attn.o_proj": hidden}, queries, config.attention_bias),
        mlp_norm=_norm(tensors, f"{prefix}post_attention_layernorm.weight", config, arithmetic),
        gate_up=linear({"mlp.gate_proj": inner, "mlp.up_proj": inner}, hidden, config.mlp_bias),
        down=linear({"mlp.down_proj": hidden}, inner, config.mlp_bias),
    )


def _norm(tensors: "TensorFiles", name: str, config: ModelConfig, arithmetic: Arithmetic) -> Tensor:
    return tensors.read(name, config.hidden).to(arithmetic.dtype).float()


class TensorFiles:
    """One or more safetensors files read as one mapping."""

    def __init__(self, files: Sequence[Path]) -> None:
        try:
            self._open: list[Any] = [safe_open(path, framework="pt") for path in files]
        except (OSError, SafetensorError) as error:
            raise SetupError(f"cannot read the weights {', '.join(map(str, files))}: {error}") from error
        self._file_of = {name: file for file in self._open for name in file.keys()}  # noqa: SIM118

    def __enter__(self) -> "TensorFiles":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for file in self._open:
            file.__exit__(kind, error, at)

    def read(self, name: str, *shape: int) -> Tensor:
        if name not in self._file_of:
            raise SetupError(f"the weights have no tensor {name}: the file is incomplete or of another architecture")
        tensor: Tensor = self._file_of[name].get_tensor(name)
        if tensor.shape != shape:
            raise SetupError(f"tensor {name} is {list(tensor.shape)}, the config says {list(shape)}")
        return tensor
