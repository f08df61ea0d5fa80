"""A Llama model's weights, by their Hugging Face names, fused and laid out for an arithmetic."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.arithmetic import Arithmetic
from kernels.linear import Linear
from services.engine.model_config import ModelConfig
from services.engine.weight_source import WeightSource


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


def load_weights(source: WeightSource, config: ModelConfig, arithmetic: Arithmetic) -> Weights:
    """Raises `SetupError` for a tensor that is missing or of the wrong shape."""
    embedding = source.read("model.embed_tokens.weight", config.vocab_size, config.hidden)
    head = embedding if config.tied_head else source.read("lm_head.weight", config.vocab_size, config.hidden)
    return Weights(
        embedding=embedding.to(arithmetic.dtype),
        layers=[_layer(source, f"model.layers.{i}.", config, arithmetic) for i in range(config.num_layers)],
        norm=_norm(source, "model.norm.weight", config, arithmetic),
        head=arithmetic.head(head),
    )


def _layer(source: WeightSource, prefix: str, config: ModelConfig, arithmetic: Arithmetic) -> Layer:
    hidden, inner = config.hidden, config.intermediate
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def linear(parts: dict[str, int], inputs: int, has_bias: bool) -> Linear:
        """One product of several projections of the same input, `parts`: name -> outputs."""
        weights = [source.read(f"{prefix}{name}.weight", outputs, inputs) for name, outputs in parts.items()]
        biases = [source.read(f"{prefix}{name}.bias", outputs) for name, outputs in parts.items() if has_bias]
        return arithmetic.linear(torch.cat(weights), torch.cat(biases) if biases else None)

    attention = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
    return Layer(
        attention_norm=_norm(source, f"{prefix}input_layernorm.weight", config, arithmetic),
        qkv=linear(attention, hidden, config.attention_bias),
        attention_out=linear({"self_attn.o_proj": hidden}, queries, config.attention_bias),
        mlp_norm=_norm(source, f"{prefix}post_attention_layernorm.weight", config, arithmetic),
        gate_up=linear({"mlp.gate_proj": inner, "mlp.up_proj": inner}, hidden, config.mlp_bias),
        down=linear({"mlp.down_proj": hidden}, inner, config.mlp_bias),
    )


def _norm(source: WeightSource, name: str, config: ModelConfig, arithmetic: Arithmetic) -> Tensor:
    return source.read(name, config.hidden).to(arithmetic.dtype).float()
