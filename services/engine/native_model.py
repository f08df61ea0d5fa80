"""The arithmetic int8 in C++: one call a pass, whatever its rows are."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.arithmetic import Arithmetic
from kernels.native.decoder import Call, Decoder, DecoderLayer, DecoderShape, NativeLinear
from kernels.native.gate import DrawGate
from kernels.reference.rope import RopeTable
from schemas.errors import SetupError
from services.engine.lease import Lease
from services.engine.model import Files, Model, ModelConfig, Span
from services.engine.stepper import Found, Gate, Passed, Wanted
from services.engine.weight_source import WeightSource, open_weights
from services.models.weight_layout import LayerLayout, Product, layout_of


class NativeModel(Model):
    """The bits are those of `ReferenceModel` with the same arithmetic."""

    borrows = True

    def __init__(self, files: Files, arithmetic: Arithmetic, lent: Sequence[int] = ()) -> None:
        """With torch's number of threads, and one more for each core that may be `lent`.

        Raises `SetupError` for a model that is unsupported or incomplete.
        """
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
        products = [product for layer in self.layers for product in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        self.weight_bytes = sum(product.num_bytes for product in [*products, self._head])
        self._lent = list(lent)
        self._lease: Lease | None = None
        self._decoder = self._new_decoder()

    def with_arithmetic(self, arithmetic: Arithmetic) -> "NativeModel":
        other = copy.copy(self)
        other.arithmetic = arithmetic
        other._decoder = other._new_decoder()
        return other

    def use_threads(self, lease: Lease) -> None:
        self._lease = lease

    def _run(self, call: Call) -> None:
        lease, self._lease = self._lease, None  # it was for this pass
        self._decoder.run(call, lease)

    def forward(
        self, token_ids: Sequence[int] | Tensor, spans: Sequence[Span], pool: Tensor, logit_rows: Sequence[int] | None
    ) -> Tensor:
        rows = range(len(token_ids)) if logit_rows is None else logit_rows
        if not len(token_ids):
            return torch.empty(0, self.config.vocab_size)
        call = self._call(token_ids, spans, pool, rows)
        logits = call.ask_logits(self.config.vocab_size)
        self._run(call)
        return logits

    def new_gate(self) -> DrawGate:
        return DrawGate()

    def step(
        self,
        token_ids: Sequence[int],
        spans: Sequence[Span],
        pool: Tensor,
        wanted: Sequence[Wanted],
        gate: Gate | None = None,
    ) -> Passed:
        """As `services.engine.stepper.Stepper`: one call for the pass and what is drawn from it."""
        rows = sorted({want.row for want in wanted})
        number = {row: index for index, row in enumerate(rows)}
        call = self._call(token_ids, spans, pool, rows)
        ids, status = call.ask_draws([(number[want.row], want.draw) for want in wanted if want.draw is not None])
        if gate is not None:
            assert isinstance(gate, DrawGate)
            call.draw_behind(gate)
        finite = call.ask_finite()
        copied = any(want.draw is None for want in wanted)
        logits = call.ask_logits(self.config.vocab_size).numpy() if copied else None
        self._run(call)
        drawn = iter(zip(ids.tolist(), status.tolist(), strict=True))
        found: list[Found] = []
        for want in wanted:
            if want.draw is None:
                assert logits is not None
                found.append(logits[number[want.row]])
            else:
                token, bad = next(drawn)
                found.append(None if bad else token)
        return Passed(found, finite)

    def _call(
        self, token_ids: Sequence[int] | Tensor, spans: Sequence[Span], pool: Tensor, rows: Sequence[int]
    ) -> Call:
        form = self.form_of(pool, spans, len(token_ids))
        call = Call(token_ids, spans, pool, form.page_tokens, rows)
        call.check(self.config.vocab_size)
        return call

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
            lent=self._lent,
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
