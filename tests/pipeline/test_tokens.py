"""The same job gives the same tokens: whatever the batch, the cache, the block size, the worker or the stage."""

import itertools
from pathlib import Path

import pytest

from schemas.events import Done
from schemas.job import Sampling
from tests.golden.goldens import GOLDENS
from tests.golden.oracle import generate
from tests.pipeline.conftest import Pipelines, loaded

FEW = ["rain", "rain for the clerk", "library", "alphabet", "1 tokens", "63 tokens", "64 tokens", "65 tokens"]


@pytest.mark.parametrize(
    ("block_tokens", "num_tokens"), [(16, 20), *(pytest.param(size, 64, marks=pytest.mark.slow) for size in (16, 64))]
)
async def test_float32_equals_transformers_cold_and_warm_alone_and_together(
    pipelines: Pipelines, tmp_path: Path, block_tokens: int, num_tokens: int
):
    goldens = [GOLDENS[name] for name in FEW]
    jobs = [golden.job(max_tokens=num_tokens) for golden in goldens]
    expected = [golden.token_ids[:num_tokens] for golden in goldens]
    async with pipelines("float32", kv={"block_tokens": block_tokens}) as pipeline:
        cold = await pipeline.ask_all(jobs)
        assert [answer.token_ids() for answer in cold] == expected
        assert all(isinstance(answer.end, Done) for answer in cold)
        warm = await pipeline.ask_all(jobs)
        assert [answer.essence for answer in warm] == [answer.essence for answer in cold]
        for golden, answer in zip(goldens, warm, strict=True):
            assert answer.start.cached_tokens == len(golden.prompt_token_ids) - 1, "all but the last token is a hit"
    async with pipelines("float32", kv={"block_tokens": block_tokens}) as restarted:
        for golden in goldens[:2]:
            alone = await restarted.ask(**golden.job())
            assert alone.token_ids() == golden.token_ids
            assert alone.start.cached_tokens == len(golden.prompt_token_ids) - 1


@pytest.mark.parametrize(
    ("dtype", "num_tokens"),
    [
        ("int8", 24),
        ("bfloat16", 6),
        *(pytest.param(dtype, 24, marks=pytest.mark.slow) for dtype in ("bfloat16", "float32")),
    ],
)
async def test_sampled_answers_equal_a_plain_single_run(pipelines: Pipelines, dtype: str, num_tokens: int):
    """Temperature 1, two choices, against one process without cache, batch, queue or store."""
    model, _ = loaded(dtype)
    jobs = [
        GOLDENS[name].job(temperature=1.0, seed=11, n=2, max_tokens=num_tokens, **extra)
        for name, extra in itertools.product(
            ["rain for the clerk", "65 tokens"],
            [{}, {"top_p": 0.9, "top_k": 50}, {"repetition_penalty": 1.3, "presence_penalty": 0.5, "min_p": 0.02}],
        )
    ]
    fields = set(Sampling.__struct_fields__)
    expected = [
        generate(model, job["prompt_token_ids"], Sampling(**{k: v for k, v in job.items() if k in fields}))
        for job in jobs
    ]
    async with pipelines(dtype) as pipeline:
        cold = await pipeline.ask_all(jobs)
        assert [[answer.token_ids(0), answer.token_ids(1)] for answer in cold] == expected
        warm = await pipeline.ask_all(jobs)
        assert [answer.essence for answer in warm] == [answer.essence for answer in cold]


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
async def test_prefill_and_decode_make_the_same_blobs(pipelines: Pipelines, tmp_path: Path, dtype: str):
    """Blocks that decode generated in one store, the same tokens prefilled into another: equal byte for byte."""
    made, computed = tmp_path / "made", tmp_path / "computed"
    prompts = [GOLDENS[name].prompt_token_ids for name in ("rain", "17 tokens")]
    async with pipelines(dtype, made, kv={"block_tokens": 16}) as pipeline:
        jobs = [{"prompt_token_ids": p, "max_tokens": 40, "seed": 3, "ignore_eos": True} for p in prompts]
        answers = await pipeline.ask_all(jobs)
    async with pipelines(dtype, computed, kv={"block_tokens": 16}) as pipeline:
        for prompt, answer in zip(prompts, answers, strict=True):
            await pipeline.ask(prompt_token_ids=prompt + answer.token_ids(), max_tokens=1)
    generated = {path.name: path.read_bytes() for path in made.rglob("*.kvb")}
    prefilled = {path.name: path.read_bytes() for path in computed.rglob("*.kvb")}
    shared = generated.keys() & prefilled.keys()
    full_blocks = sum((len(prompt) + 39) // 16 for prompt in prompts)
    assert len(shared) == full_blocks
    assert {name: generated[name] for name in shared} == {name: prefilled[name] for name in shared}
