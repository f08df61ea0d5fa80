"""All 20 frozen prompts through everything that must not matter. Minutes: `make test-all`, and before a release.

For each arithmetic, block size and number of threads: cold and all at once, warm three times over, one at a time after
a restart of every worker on the same folder, and through the HTTP door, streaming and not.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import torch

from schemas.job import Sampling
from services.gateway.gateway import Gateway
from services.settings import Api, Settings
from tests.golden.goldens import GOLDENS
from tests.golden.oracle import generate
from tests.pipeline.conftest import Pipelines, loaded
from tests.pipeline.local import LocalPipeline

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SAMPLED = {"temperature": 1.0, "seed": 2024, "n": 2, "max_tokens": 24}


def jobs_of(sampling: dict[str, Any]) -> list[dict[str, Any]]:
    return [golden.job(**sampling) for golden in GOLDENS.values()]


def expected_of(dtype: str, sampling: dict[str, Any]) -> list[list[list[int]]]:
    """`transformers` where it can say, else our own plain single run."""
    if dtype == "float32" and not sampling:
        return [[golden.token_ids] for golden in GOLDENS.values()]
    model, _ = loaded(dtype)
    return [
        generate(model, job["prompt_token_ids"], Sampling(**{"seed": 0, "n": 1, **_sampling_only(job)}))
        for job in jobs_of(sampling)
    ]


def _sampling_only(job: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in job.items() if name != "prompt_token_ids"}


async def asked(pipeline: LocalPipeline, jobs: list[dict[str, Any]]) -> list[list[list[int]]]:
    answers = await pipeline.ask_all(jobs)
    return [[answer.token_ids(c) for c in range(job.get("n", 1))] for job, answer in zip(jobs, answers, strict=True)]


@pytest.mark.parametrize(("block_tokens", "threads"), [(64, 1), (16, 2)])
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
async def test_nothing_that_must_not_matter_does(
    pipelines: Pipelines, dtype: str, sampling: dict[str, Any], block_tokens: int, threads: int
):
    loaded(dtype)
    torch.set_num_threads(threads)
    try:
        expected = await asyncio.to_thread(expected_of, dtype, sampling)
        jobs = jobs_of(sampling)
        kv = {"kv": {"block_tokens": block_tokens}}
        async with pipelines(dtype, **kv) as pipeline:
            for _ in range(4):
                assert await asked(pipeline, jobs) == expected
        async with pipelines(dtype, **kv) as restarted:
            for job, tokens in zip(jobs, expected, strict=True):
                assert await asked(restarted, [job]) == [tokens]
            texts = [[restarted.text.tokenizer.decode(ids) for ids in tokens] for tokens in expected]
            async with front_door(restarted) as post:
                for stream in (False, True):
                    assert await asyncio.gather(*(post(job, stream) for job in jobs)) == texts
    finally:
        torch.set_num_threads(1)


@contextlib.asynccontextmanager
async def front_door(pipeline: LocalPipeline) -> AsyncIterator[Any]:
    """`post(job, stream)`: the texts of the job's choices over /v1/completions."""
    settings = msgspec.structs.replace(Settings(), api=Api(port=0))
    gateway = Gateway(settings, pipeline.bus, f"gateway-{id(pipeline)}", {pipeline.text.slug: pipeline.text})
    await gateway.start()
    try:
        async with aiohttp.ClientSession(f"{gateway.url}/v1/") as session:

            async def post(job: dict[str, Any], stream: bool) -> list[str]:
                body = {**job, "prompt": job["prompt_token_ids"], "model": pipeline.text.slug, "stream": stream}
                del body["prompt_token_ids"]
                texts = [""] * job.get("n", 1)
                async with session.post("completions", json=body) as answer:
                    assert answer.status == 200, await answer.text()
                    if not stream:
                        whole = await answer.json()
                        return [choice["text"] for choice in whole["choices"]]
                    async for line in answer.content:
                        if line.startswith(b"data: {"):
                            for choice in msgspec.json.decode(line[6:])["choices"]:
                                texts[choice["index"]] += choice["text"]
                return texts

            yield post
    finally:
        await gateway.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
async def test_twenty_prompts_have_the_same_blobs_from_both_stages(pipelines: Pipelines, tmp_path: Path, dtype: str):
    """Blocks that decode generated, and the same tokens prefilled into another store: equal byte for byte."""
    made, computed = tmp_path / "made", tmp_path / "computed"
    generator = torch.Generator().manual_seed(5)
    prompts = [
        torch.randint(1000, 40_000, (int(length),), generator=generator).tolist()
        for length in torch.randint(1, 200, (20,), generator=generator)
    ]
    kv = {"kv": {"block_tokens": 16}}
    async with pipelines(dtype, made, **kv) as pipeline:
        jobs = [{"prompt_token_ids": p, "max_tokens": 64, "seed": 3, "ignore_eos": True} for p in prompts]
        answers = await pipeline.ask_all(jobs)
    async with pipelines(dtype, computed, **kv) as pipeline:
        whole = [prompt + answer.token_ids() for prompt, answer in zip(prompts, answers, strict=True)]
        await pipeline.ask_all([{"prompt_token_ids": ids, "max_tokens": 1} for ids in whole])
    generated = {path.name: path.read_bytes() for path in made.rglob("*.kvb")}
    prefilled = {path.name: path.read_bytes() for path in computed.rglob("*.kvb")}
    shared = generated.keys() & prefilled.keys()
    assert len(shared) == sum((len(prompt) + 63) // 16 for prompt in prompts)
    assert all(generated[name] == prefilled[name] for name in shared)
