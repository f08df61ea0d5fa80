"""Whatever happens to stored blocks, the tokens are those of a cold run: a miss and damage only cost time."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from schemas.events import Done
from services.engine.blocks import Blocks
from tests.golden.goldens import GOLDENS, Golden
from tests.pipeline.conftest import Pipelines
from tests.pipeline.local import LocalPipeline

GOLDEN = GOLDENS["rain for the clerk"]  # 79 tokens: four full blocks of 16 and a partial one
NUM_TOKENS = 6  # a wrong block shows at the first
BLOCKS = {"kv": {"block_tokens": 16, "codec": "none"}}


def job(golden: Golden = GOLDEN) -> dict:
    return golden.job(max_tokens=NUM_TOKENS)


def block_files(pipeline: LocalPipeline, data_dir: Path) -> list[Path]:
    """The files of the prompt's blocks, in order."""
    blocks: Blocks = pipeline.prefill.blocks
    names = [f"{ref.key.hex()}.kvb" for ref in blocks.refs("default", "", GOLDEN.prompt_token_ids)]
    return [data_dir / "kv" / "blocks" / "default" / name[:2] / name for name in names]


@pytest.mark.parametrize(("lost", "usable_tokens"), [(0, 0), (2, 32), (4, 64)])
async def test_a_hole_ends_the_usable_run(pipelines: Pipelines, tmp_path: Path, lost: int, usable_tokens: int):
    """CASES 9: what is behind a gap is computed again, and cached_tokens reports the unbroken run only."""
    async with pipelines(**BLOCKS) as pipeline:
        await pipeline.ask(**job())
        files = block_files(pipeline, tmp_path)
    assert len(files) == 5 and all(file.exists() for file in files)
    files[lost].unlink()
    async with pipelines(**BLOCKS) as pipeline:
        answer = await pipeline.ask(**job())
    assert answer.token_ids() == GOLDEN.token_ids[:NUM_TOKENS]
    assert answer.start.cached_tokens == usable_tokens


def flip_a_bit(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def cut_the_end(data: bytearray, rng: random.Random) -> None:
    del data[-rng.choice([1, 4, 16, 100, len(data) // 2, len(data)]) :]


def append_junk(data: bytearray, rng: random.Random) -> None:
    data += b"junk"


def zero_the_payload(data: bytearray, rng: random.Random) -> None:
    data[128:] = bytes(len(data) - 128)


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_bit,
        cut_the_end,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (append_junk, zero_the_payload)),
    ],
)
async def test_damaged_blocks_are_computed_again(
    pipelines: Pipelines, tmp_path: Path, damage: Callable[[bytearray, random.Random], None]
):
    """CASES 7 and 8: each of the prompt's blocks in turn, and all of them together."""
    rng = random.Random(3)
    async with pipelines(**BLOCKS) as pipeline:
        await pipeline.ask(**job())
        files = block_files(pipeline, tmp_path)
    for victims in (files[1:2], files[4:], files):
        for file in victims:
            data = bytearray(file.read_bytes())
            damage(data, rng)
            file.write_bytes(data)
        async with pipelines(**BLOCKS) as pipeline:
            answer = await pipeline.ask(**job())
            counters = pipeline.prefill.store.counters
            assert answer.token_ids() == GOLDEN.token_ids[:NUM_TOKENS]
            assert answer.start.cached_tokens == 16 * files.index(victims[0])
            assert counters.damaged >= 1
        assert all(file.exists() for file in files), "damaged blocks are replaced by good ones"


async def test_blocks_under_each_others_names_are_never_believed(pipelines: Pipelines, tmp_path: Path):
    """CASES 2 and 8: two sound blobs swapped."""
    async with pipelines(**BLOCKS) as pipeline:
        await pipeline.ask(**job())
        first, second, *_ = block_files(pipeline, tmp_path)
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)
    async with pipelines(**BLOCKS) as pipeline:
        answer = await pipeline.ask(**job())
    assert answer.token_ids() == GOLDEN.token_ids[:NUM_TOKENS] and answer.start.cached_tokens == 0


async def test_decode_sends_a_job_back_once_and_then_helps_itself(pipelines: Pipelines, tmp_path: Path):
    """Prefill and decode with separate stores: every hand-off misses, and after one rework decode computes."""
    jobs = [job(GOLDENS[name]) for name in ("rain for the clerk", "library", "65 tokens")]
    async with pipelines(decode_dir=tmp_path / "elsewhere", **BLOCKS) as pipeline:
        answers = await pipeline.ask_all(jobs)
        assert all(isinstance(answer.end, Done) for answer in answers)
        assert [a.token_ids() for a in answers] == [
            GOLDENS[name].token_ids[:NUM_TOKENS] for name in ("rain for the clerk", "library", "65 tokens")
        ]


async def test_a_read_only_store_costs_only_time(pipelines: Pipelines, tmp_path: Path):
    """CASES 23 and 24: nothing can be stored, every request is answered."""
    (tmp_path / "kv").write_bytes(b"a file where the folder of the store should be")
    async with pipelines(**BLOCKS) as pipeline:
        for _ in range(2):
            answer = await pipeline.ask(**job())
            assert answer.token_ids() == GOLDEN.token_ids[:NUM_TOKENS]


async def test_tenants_and_salts_share_nothing(pipelines: Pipelines, tmp_path: Path):
    """CASES 4: a salt can only narrow sharing. Control: the same job again is a hit."""
    async with pipelines(**BLOCKS) as pipeline:
        cold = await pipeline.ask(**job())
        salted = await pipeline.ask(**job(), cache_salt="mine")
        again = await pipeline.ask(**job(), cache_salt="mine")
        assert [a.start.cached_tokens for a in (cold, salted, again)] == [0, 0, 78]
        assert cold.essence == salted.essence == again.essence
