"""A model's weights, fused and laid out for an arithmetic."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.arithmetic import Arithmetic, Embedding, Weight
from kernels.linear import Linear
from services.engine.model_config import ModelConfig
from services.engine.weight_source import WeightSource
from services.models.weight_layout import LayerLayout, Product, layout_of


@dataclass(frozen=True)
class Layer:
    """Norms are float32; `head_norms: [heads + kv_heads, D]` of families that normalise each head of Q and K."""

    attention_norm: Tensor
    qkv: Linear
    head_norms: Tensor | None
    attention_out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class Weights:
    embedding: Embedding
    layers: list[Layer]
    norm: Tensor
    head: Linear


def load_weights(source: WeightSource, config: ModelConfig, arithmetic: Arithmetic) -> Weights:
    """Raises `SetupError` for a tensor that is missing or of the wrong shape."""
    layout = layout_of(config)
    reader = _Reader(source, config, arithmetic)
    (embedding,) = reader.weights(layout.embedding)
    (head,) = (embedding,) if layout.head == layout.embedding else reader.weights(layout.head)
    return Weights(
        embedding=arithmetic.embedding(embedding),
        layers=[reader.layer(layer) for layer in layout.layers],
        norm=reader.norm(layout.norm, config.hidden),
        head=arithmetic.head(head),
    )


class _Reader:
    """Reads what a layout names, in the form that the arithmetic takes."""

    def __init__(self, source: WeightSource, config: ModelConfig, arithmetic: Arithmetic) -> None:
        self._source = source
        self._config = config
        self._arithmetic = arithmetic

    def layer(self, layout: LayerLayout) -> Layer:
        hidden = self._config.hidden
        return Layer(
            attention_norm=self.norm(layout.attention_norm, hidden),
            qkv=self._linear(layout.qkv),
            head_norms=self._head_norms(layout),
            attention_out=self._linear(layout.attention_out),
            mlp_norm=self.norm(layout.mlp_norm, hidden),
            gate_up=self._linear(layout.gate_up),
            down=self._linear(layout.down),
        )

    def weights(self, product: Product) -> list[Weight]:
        """Those that make the product, `[rows, inputs]` each."""
        read = self._source.read_quantised if self._arithmetic.takes_blocks else self._source.read
        return [read(part.name, part.rows, product.inputs) for part in product.weight]

    def norm(self, name: str, size: int) -> Tensor:
        return self._arithmetic.norm(self._source.read(name, size))

    def _linear(self, product: Product) -> Linear:
        bias = [self._source.read(part.name, part.rows) for part in product.bias]
        return self._arithmetic.linear(self.weights(product), torch.cat(bias) if bias else None)

    def _head_norms(self, layout: LayerLayout) -> Tensor | None:
        if layout.q_norm is None or layout.k_norm is None:
            return None
        config = self._config
        queries, keys = self.norm(layout.q_norm, config.head_dim), self.norm(layout.k_norm, config.head_dim)
        return torch.cat([queries.expand(config.num_heads, -1), keys.expand(config.num_kv_heads, -1)])
