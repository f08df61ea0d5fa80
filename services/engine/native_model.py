"""The arithmetic int8 in C++: one call a pass, whatever its rows are."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.arithmetic import Arithmetic
from kernels.native.decoder import Decoder, DecoderLayer, DecoderShape, NativeLinear
from kernels.reference.rope import RopeTable
from schemas.errors import SetupError
from services.engine.model import Files, Model, ModelConfig, Span
from services.engine.weight_source import WeightSource, open_weights
from services.models.weight_layout import LayerLayout, Product, layout_of


class NativeModel(Model):
    """The bits are those of `ReferenceModel` with the same arithmetic."""

    def __init__(self, files: Files, arithmetic: Arithmetic) -> None:
        """Raises `SetupError` for a model that is unsupported or incomplete."""
        super().__init__(ModelConfig.from_hf(files.config), arithmetic)
        config = self.config
        if reason := self._shape(arithmetic).refusal():
            raise SetupError(f"{arithmetic.name} cannot compute this model: {reason}: use --dtype bfloat16")
        with open_weights(files.weights, files.config) as source:
            reader, layout = _Reader(source), layout_of(config)
            self.layers = [reader.layer(layer, config) for layer in layout.layers]
            self._embedding = reader.product(layout.embedding)
            self._head = self._embedding if layout.head == layout.embedding else reader.product(layout.head)
            self._norm = reader.norm(layout.norm, config.hidden)
        self._rope = RopeTable(config.head_dim, config.context_tokens, config.rope_theta, config.rope_scaling)
        self._decoder = self._new_decoder()

    def with_arithmetic(self, arithmetic: Arithmetic) -> "NativeModel":
        other = copy.copy(self)
        other.arithmetic = arithmetic
        other._decoder = other._new_decoder()
        return other

    def forward(
        self, token_ids: Sequence[int] | Tensor, spans: Sequence[Span], pool: Tensor, logit_rows: Sequence[int] | None
    ) -> Tensor:
        ids = torch.as_tensor(token_ids, dtype=torch.int64)
        form = self.form_of(pool, spans, ids.shape[0])
        rows = torch.arange(ids.shape[0]) if logit_rows is None else torch.tensor(logit_rows, dtype=torch.int64)
        if not ids.shape[0]:
            return torch.empty(0, self.config.vocab_size)
        if not (0 <= int(ids.min()) and int(ids.max()) < self.config.vocab_size):
            raise ValueError(f"token ids from {int(ids.min())} to {int(ids.max())}")
        return self._decoder.logits(ids, spans, pool, form.page_tokens, rows, torch.get_num_threads())

    def _new_decoder(self) -> Decoder:
        return Decoder(
            self._shape(self.arithmetic),
            self.layers,
            embedding=self._embedding,
            norm=self._norm,
            head=self._head,
            cos=self._rope.cos,
            sin=self._rope.sin,
            threads=torch.get_num_threads(),
        )

    def _shape(self, arithmetic: Arithmetic) -> DecoderShape:
        config = self.config
        return DecoderShape(
            layers=config.num_layers,
            hidden=config.hidden,
            inner=config.intermediate,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab=config.vocab_size,
            positions=config.context_tokens,
            norm_eps=config.norm_eps,
            quantisation=arithmetic.quantisation,
        )


class _Reader:
    """Lays out what a layout names."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def layer(self, layout: LayerLayout, config: ModelConfig) -> DecoderLayer:
        return DecoderLayer(
            attention_norm=self.norm(layout.attention_norm, config.hidden),
            mlp_norm=self.norm(layout.mlp_norm, config.hidden),
            qkv=self.product(layout.qkv),
            out=self.product(layout.attention_out),
            gate_up=self.product(layout.gate_up),
            down=self.product(layout.down),
            q_norm=self.norm(layout.q_norm, config.head_dim) if layout.q_norm else None,
            k_norm=self.norm(layout.k_norm, config.head_dim) if layout.k_norm else None,
        )

    def product(self, product: Product) -> NativeLinear:
        parts = [self._source.read_quantised(part.name, part.rows, product.inputs) for part in product.weight]
        bias = [self._source.read(part.name, part.rows).float() for part in product.bias]
        return NativeLinear(parts, torch.cat(bias) if bias else None)

    def norm(self, name: str, size: int) -> Tensor:
        return self._source.read(name, size).float().contiguous()
