"""transformers' own forward pass, float32, on a Hugging Face folder, or on a GGUF file that it dequantises."""

import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM


class Peer:
    def __init__(self, model: str, threads: int, max_batch: int, ctx: int, steps: int) -> None:
        self.engine = f"transformers {transformers.__version__} float32"
        torch.set_num_threads(threads)
        path = Path(model)
        folder, more = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **more)

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> Any:
        """`[T, V] float32`."""
        return self._model(torch.tensor([token_ids])).logits[0].float().numpy()

    @torch.inference_mode()
    def measure(self, batch: int, ctx: int, steps: int, salt: int) -> dict[str, float]:
        """Tokens a second, all sequences together; of `ctx` tokens each, then of `steps` single ones."""
        ids = torch.stack([(torch.arange(ctx) + 7 * i) % 40_000 + 1000 for i in range(batch)])
        began_s = time.perf_counter()
        cache = self._model(ids, use_cache=True).past_key_values
        prefilled_s = time.perf_counter()
        for step in range(steps):
            self._model(torch.full((batch, 1), 500 + step), past_key_values=cache, use_cache=True)
        decode_s = time.perf_counter() - prefilled_s
        return {"prefill_tok_s": batch * ctx / (prefilled_s - began_s), "decode_tok_s": batch * steps / decode_s}
