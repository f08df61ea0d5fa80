"""llama.cpp through the C interface of llama-cpp-python, on a GGUF file."""

import time
from importlib.metadata import version
from typing import Any

import llama_cpp
import numpy as np

BATCH_ROWS = 2048


class Peer:
    def __init__(self, model: str, threads: int, max_batch: int, ctx: int, steps: int) -> None:
        self.engine = f"llama.cpp (llama-cpp-python {version('llama-cpp-python')})"
        self._threads = threads
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), params)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {model}")

    def measure(self, batch: int, ctx: int, steps: int, salt: int) -> dict[str, float]:
        """Tokens a second, all sequences together; of `ctx` tokens each, then of `steps` single ones."""
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = (ctx + steps + 16) * batch + 512
        params.n_batch, params.n_ubatch = BATCH_ROWS, 512
        params.n_threads = params.n_threads_batch = self._threads
        params.n_seq_max = batch
        context = llama_cpp.llama_init_from_model(self._model, params)
        rows = llama_cpp.llama_batch_init(max(BATCH_ROWS, ctx), 0, batch)
        try:
            return self._measure(context, rows, batch, ctx, steps)
        finally:
            llama_cpp.llama_batch_free(rows)
            llama_cpp.llama_free(context)

    def logits(self, token_ids: list[int]) -> Any:
        """`[T, V] float32`."""
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = len(token_ids) + 64
        params.n_batch, params.n_ubatch = BATCH_ROWS, 512
        params.n_threads = params.n_threads_batch = self._threads
        context = llama_cpp.llama_init_from_model(self._model, params)
        rows = llama_cpp.llama_batch_init(BATCH_ROWS, 0, 1)
        vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        found = np.empty((len(token_ids), vocab), np.float32)
        try:
            for start in range(0, len(token_ids), 512):
                positions = range(start, min(start + 512, len(token_ids)))
                for row, position in enumerate(positions):
                    _fill(rows, row, token_ids[position], position, 0, True)
                rows.n_tokens = len(positions)
                _decode(context, rows)
                for row, position in enumerate(positions):
                    found[position] = llama_cpp.llama_get_logits_ith(context, row)[:vocab]
        finally:
            llama_cpp.llama_batch_free(rows)
            llama_cpp.llama_free(context)
        return found

    def _measure(self, context: Any, rows: Any, batch: int, ctx: int, steps: int) -> dict[str, float]:
        began_s = time.perf_counter()
        for sequence in range(batch):
            for start in range(0, ctx, BATCH_ROWS):
                positions = range(start, min(ctx, start + BATCH_ROWS))
                for row, position in enumerate(positions):
                    token = 1000 + (position + 7 * sequence) % 40_000
                    _fill(rows, row, token, position, sequence, position == ctx - 1)
                rows.n_tokens = len(positions)
                _decode(context, rows)
        llama_cpp.llama_synchronize(context)
        prefilled_s = time.perf_counter()
        for step in range(steps):
            for sequence in range(batch):
                _fill(rows, sequence, 500 + step, ctx + step, sequence, True)
            rows.n_tokens = batch
            _decode(context, rows)
        llama_cpp.llama_synchronize(context)
        decode_s = time.perf_counter() - prefilled_s
        return {"prefill_tok_s": batch * ctx / (prefilled_s - began_s), "decode_tok_s": batch * steps / decode_s}


def _fill(rows: Any, row: int, token: int, position: int, sequence: int, wants_logits: bool) -> None:
    rows.token[row] = token
    rows.pos[row] = position
    rows.n_seq_id[row] = 1
    rows.seq_id[row][0] = sequence
    rows.logits[row] = wants_logits


def _decode(context: Any, rows: Any) -> None:
    if llama_cpp.llama_decode(context, rows) != 0:
        raise SystemExit("llama.cpp could not run a batch")
