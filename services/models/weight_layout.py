"""Which tensors of a model make which product, in what order: data, for whoever reads weights in any format."""

from collections.abc import Iterator
from dataclasses import dataclass

from services.models.architecture import Architecture

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Part:
    """One tensor by its Hugging Face name, with the rows that it brings."""

    name: str
    rows: int


@dataclass(frozen=True)
class Product:
    """`weight`: tensors `[rows, inputs]` whose rows follow one another as the product's outputs. `bias`: tensors
    `[rows]` likewise, none where the product has no bias."""

    inputs: int
    weight: tuple[Part, ...]
    bias: tuple[Part, ...] = ()

    @property
    def outputs(self) -> int:
        return sum(part.rows for part in self.weight)


@dataclass(frozen=True)
class LayerLayout:
    """`qkv`: the rows of Q, of K, of V. `gate_up`: those of the gate, then of up. The norms are names: `[hidden]`, and
    `[head_dim]` for `q_norm` and `k_norm`, which only some families have."""

    attention_norm: str
    qkv: Product
    q_norm: str | None
    k_norm: str | None
    attention_out: Product
    mlp_norm: str
    gate_up: Product
    down: Product

    def products(self) -> Iterator[Product]:
        yield from (self.qkv, self.attention_out, self.gate_up, self.down)


@dataclass(frozen=True)
class WeightLayout:
    """`embedding` is looked up by rows and never multiplied; with a tied head, `head` is the same tensor."""

    embedding: Product
    layers: tuple[LayerLayout, ...]
    norm: str
    head: Product

    def products(self) -> Iterator[Product]:
        """All whose weights may be quantised, the embedding too."""
        yield self.embedding
        for layer in self.layers:
            yield from layer.products()
        yield self.head


def layout_of(config: Architecture) -> WeightLayout:
    embedding = _product(config.hidden, {EMBEDDING: config.vocab_size})
    return WeightLayout(
        embedding=embedding,
        layers=tuple(_layer(config, f"model.layers.{i}.") for i in range(config.num_layers)),
        norm="model.norm.weight",
        head=embedding if config.tied_head else _product(config.hidden, {HEAD: config.vocab_size}),
    )


def shapes_of(config: Architecture) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model has to have."""
    layout = layout_of(config)
    shapes: dict[str, tuple[int, ...]] = {layout.norm: (config.hidden,)}
    for product in layout.products():
        shapes |= {part.name: (part.rows, product.inputs) for part in product.weight}
        shapes |= {part.name: (part.rows,) for part in product.bias}
    for layer in layout.layers:
        shapes |= {layer.attention_norm: (config.hidden,), layer.mlp_norm: (config.hidden,)}
        shapes |= {name: (config.head_dim,) for name in (layer.q_norm, layer.k_norm) if name}
    return shapes


def _layer(config: Architecture, prefix: str) -> LayerLayout:
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    inner = config.intermediate
    qkv = {"q_proj.weight": queries, "k_proj.weight": keys, "v_proj.weight": keys}
    gate_up = {"gate_proj.weight": inner, "up_proj.weight": inner}
    if config.fused:
        qkv, gate_up = {"qkv_proj.weight": queries + 2 * keys}, {"gate_up_proj.weight": 2 * inner}
    return LayerLayout(
        attention_norm=f"{prefix}input_layernorm.weight",
        qkv=_product(config.hidden, qkv, config.qkv_bias, attention),
        q_norm=f"{attention}q_norm.weight" if config.head_norms else None,
        k_norm=f"{attention}k_norm.weight" if config.head_norms else None,
        attention_out=_product(queries, {"o_proj.weight": config.hidden}, config.out_bias, attention),
        mlp_norm=f"{prefix}post_attention_layernorm.weight",
        gate_up=_product(config.hidden, gate_up, config.mlp_bias, mlp),
        down=_product(inner, {"down_proj.weight": config.hidden}, config.mlp_bias, mlp),
    )


def _product(inputs: int, rows: dict[str, int], has_bias: bool = False, prefix: str = "") -> Product:
    weight = tuple(Part(prefix + name, count) for name, count in rows.items())
    bias = tuple(Part(part.name.removesuffix("weight") + "bias", part.rows) for part in weight)
    return Product(inputs, weight, bias if has_bias else ())
