"""The forward pass of Llama and its relatives, one operation of the arithmetic after the other."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.arithmetic import Arithmetic, Pass
from kernels.reference.rope import RopeTable, rotate_
from services.engine.model import Files, Model, ModelConfig, Span
from services.engine.weight_source import open_weights
from services.engine.weights import Layer, load_weights


class ReferenceModel(Model):
    """Of any arithmetic. How its products are made is the arithmetic's business; their order is written here."""

    def __init__(self, files: Files, arithmetic: Arithmetic) -> None:
        """Raises `SetupError` for a model that is unsupported or incomplete."""
        super().__init__(ModelConfig.from_hf(files.config), arithmetic)
        with open_weights(files.weights, files.config) as source:
            self._weights = load_weights(source, self.config, arithmetic)
        self._rope = RopeTable(
            self.config.head_dim, self.config.context_tokens, self.config.rope_theta, self.config.rope_scaling
        )

    @torch.inference_mode()
    def forward(
        self, token_ids: Sequence[int] | Tensor, spans: Sequence[Span], pool: Tensor, logit_rows: Sequence[int] | None
    ) -> Tensor:
        ids = torch.as_tensor(token_ids, dtype=torch.int64)
        form = self.form_of(pool, spans, ids.shape[0])
        rows = torch.arange(ids.shape[0]) if logit_rows is None else torch.tensor(logit_rows, dtype=torch.int64)
        if not ids.shape[0]:
            return torch.empty(0, self.config.vocab_size)
        running = self.arithmetic.begin(spans, pool, form, self.config.num_heads)
        rotation = self._rope.rows(running.positions)
        x = self._weights.embedding(ids)
        for number, layer in enumerate(self._weights.layers):
            x = self._layer(x, number, layer, running, rotation)
        return self._weights.head(self.arithmetic.rms_norm(x[rows], self._weights.norm, self.config.norm_eps))

    def _layer(self, x: Tensor, number: int, layer: Layer, running: Pass, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """`x: [R, hidden] float32`, changed in place; `rotation` of the pass's positions."""
        config, arithmetic = self.config, self.arithmetic
        normed = arithmetic.rms_norm(x, layer.attention_norm, config.norm_eps)
        qkv = layer.qkv(normed).view(x.shape[0], -1, config.head_dim)
        rotated = qkv[:, : config.num_heads + config.num_kv_heads]
        if layer.head_norms is not None:
            arithmetic.head_norm_(rotated, layer.head_norms, config.norm_eps)
        rotate_(rotated, *rotation)
        running.write_kv(number, qkv[:, config.num_heads :])
        x.add_(layer.attention_out(running.attend(number, qkv[:, : config.num_heads])))
        gate_up = layer.gate_up(arithmetic.rms_norm(x, layer.mlp_norm, config.norm_eps))
        return x.add_(layer.down(arithmetic.silu_gate(gate_up)))
