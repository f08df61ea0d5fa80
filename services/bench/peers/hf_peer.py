"""transformers' own forward pass, float32, on a Hugging Face folder."""

import time

import torch
import transformers
from transformers import AutoModelForCausalLM


class Peer:
    def __init__(self, model: str, threads: int, max_batch: int, ctx: int, steps: int) -> None:
        self.engine = f"transformers {transformers.__version__} float32"
        torch.set_num_threads(threads)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

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
