"""Codecs and quantisations end to end: tokens do not depend on where blocks come from, or on what became of them."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from kvstore.redis.tier import key_of
from schemas.blob import Codec, Quantisation
from services.worker import runtime
from tests.golden.goldens import GOLDENS
from tests.kvstore.valkey import Valkey
from tests.pipeline.conftest import Pipelines
from tests.pipeline.earlier_worker import continued
from tests.pipeline.local import Answer, LocalPipeline

PROMPT = [3 + (7 * i) % 250 for i in range(101)]  # six blocks of 16 and a partial one
KINDS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "sampled": {"top_p": 0.95, "seed": 11}}
FORMS = [(codec.name.lower(), quantisation.name.lower()) for codec in Codec for quantisation in Quantisation]


@pytest.fixture
def nothing_resident(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every block comes from the store: none stays in a worker's pages when nobody holds it."""
    monkeypatch.setattr(runtime, "IDLE_CONTEXTS", 0)
    yield


def job(kind: str, **changes: Any) -> dict[str, Any]:
    return {"prompt_token_ids": PROMPT, "max_tokens": 40, "ignore_eos": True, **KINDS[kind], **changes}


def block_files(pipeline: LocalPipeline, data_dir: Path, prompt: list[int] = PROMPT) -> list[Path]:
    names = [f"{ref.key.hex()}.kvb" for ref in pipeline.prefill.blocks.refs("default", "", prompt)]
    return [data_dir / "kv" / "blocks" / "default" / name[:2] / name for name in names]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quantisation", ["int8", "int4"])
async def test_cold_warm_and_generated_blocks_give_the_same_tokens(
    tiny_pipelines: Pipelines, nothing_resident: None, tmp_path: Path, quantisation: str, kind: str
):
    """Prefilled, loaded by either stage, made by decode, and taken over in the middle of a block."""
    kv = {"quantisation": quantisation, "codec": "zstd"}
    async with tiny_pipelines(kv=kv) as pipeline:
        cold = await pipeline.ask(**job(kind))
        warm = await pipeline.ask(**job(kind))
        tokens = cold.token_ids()
        assert warm.essence == cold.essence
        assert (cold.start.cached_tokens, warm.start.cached_tokens) == (0, 100)
        for cut in (5, 14, 30):
            for lost in ({}, {"salt": "lost"}, {"salt": "never", "stored_blocks": 0}):
                taken = await continued(pipeline, job(kind), cold.events[:cut], **lost)
                assert taken.essence == cold.essence
    async with tiny_pipelines(kv=kv) as pipeline:  # with a decode worker that drained: all it made is stored
        longer = job(kind, prompt_token_ids=PROMPT + tokens, max_tokens=20)
        warm, cold = await pipeline.ask(**longer), await pipeline.ask(**longer, cache_salt="cold")
        assert (warm.start.cached_tokens, cold.start.cached_tokens) == (128, 0)
        assert warm.token_ids() == cold.token_ids()
        if kind == "greedy":
            again = await pipeline.ask(**job(kind, prompt_token_ids=PROMPT + tokens[:20], max_tokens=20))
            assert again.start.cached_tokens == 112 and again.token_ids() == tokens[20:]
        headers = [file.read_bytes()[:8] for file in block_files(pipeline, tmp_path)]
    assert {header[6] for header in headers} == {Quantisation[quantisation.upper()]}


async def test_int8_leaves_the_golden_answers_as_they_are(pipelines: Pipelines):
    """CASES 11. Up to the end of each answer, as a user gets it; cold and then from the store."""
    names = ["rain for the clerk", "library", "france"]
    jobs = [GOLDENS[name].job(max_tokens=20, ignore_eos=False) for name in names]
    async with pipelines(kv={"quantisation": "int8", "codec": "zstd", "block_tokens": 16}) as pipeline:
        for _ in range(2):
            answers = await pipeline.ask_all(jobs)
            for name, answer in zip(names, answers, strict=True):
                ids = answer.token_ids()
                assert ids == GOLDENS[name].token_ids[: len(ids)] and answer.finish().reason == "stop"
        assert all(answer.start.cached_tokens > 30 for answer in answers)


class Blobs(Protocol):
    """The stored blobs of the prompt, in order, from underneath the store."""

    def read(self, block: int) -> bytes: ...

    def write(self, block: int, blob: bytes) -> None: ...


class Files(list[Path]):
    def read(self, block: int) -> bytes:
        return self[block].read_bytes()

    def write(self, block: int, blob: bytes) -> None:
        self[block].write_bytes(blob)


class Strings:
    """In Valkey."""

    def __init__(self, valkey: Valkey, pipeline: LocalPipeline) -> None:
        self._client = valkey.client()
        self._keys = [key_of(ref.name) for ref in pipeline.prefill.blocks.refs("default", "", PROMPT)]

    def read(self, block: int) -> bytes:
        blob: bytes = self._client.get(self._keys[block])
        return blob

    def write(self, block: int, blob: bytes) -> None:
        self._client.set(self._keys[block], blob, keepttl=True)


async def served_with_flips(pipeline: LocalPipeline, blobs: Blobs, num_flips: int) -> None:
    """Each time one bit of one of the prompt's stored blocks; the answer is the cold one, and the block is mended."""
    rng = random.Random(23)
    cold = await pipeline.ask(**job("sampled", max_tokens=3))
    assert (await pipeline.ask(**job("sampled", max_tokens=3))).start.cached_tokens == 100
    for number in range(num_flips):
        victim = rng.randrange(7)
        blob = bytearray(blobs.read(victim))
        bit = rng.randrange(8 * len(blob))
        blob[bit // 8] ^= 1 << bit % 8
        blobs.write(victim, bytes(blob))
        answer: Answer = await pipeline.ask(**job("sampled", max_tokens=3))
        assert answer.essence == cold.essence, f"bit {bit} of block {victim}"
        assert answer.start.cached_tokens == 16 * victim
        assert pipeline.prefill.store.counters.damaged == number + 1
    assert (await pipeline.ask(**job("sampled", max_tokens=3))).start.cached_tokens == 100


@pytest.mark.parametrize(("codec", "quantisation"), FORMS)
@pytest.mark.parametrize("num_flips", [4, pytest.param(50, marks=pytest.mark.slow)])
async def test_flipped_bits_change_no_answer(
    tiny_pipelines: Pipelines, nothing_resident: None, tmp_path: Path, codec: str, quantisation: str, num_flips: int
):
    """CASES 8."""
    async with tiny_pipelines(kv={"quantisation": quantisation, "codec": codec}) as pipeline:
        await served_with_flips(pipeline, Files(block_files(pipeline, tmp_path)), num_flips)


@pytest.mark.parametrize(
    ("codec", "quantisation", "num_flips"),
    [("lz4", "none", 4), *(pytest.param(*form, 50, marks=pytest.mark.slow) for form in FORMS)],
)
async def test_flipped_bits_in_valkey_change_no_answer(
    tiny_pipelines: Pipelines, nothing_resident: None, valkey: Valkey, codec: str, quantisation: str, num_flips: int
):
    """CASES 8. The workers have nothing else: what NVMe holds would be used first."""
    kv = {"quantisation": quantisation, "codec": codec, "redis_url": valkey.url, "redis_timeout_s": 10.0}
    async with tiny_pipelines(kv=kv) as pipeline:
        for stage in (pipeline.prefill, pipeline.decode):
            nvme, redis = stage.store.tiers
            stage.store.tiers = (redis,)
            stage.blocks.must_reach_all = lambda: True
            nvme.close()
        await served_with_flips(pipeline, Strings(valkey, pipeline), num_flips)
