"""Builds with two arithmetics: prefill computes prompts, decode what it generates, and both always give the same."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from schemas.errors import SetupError
from schemas.events import Done, Error
from services.bus.connection import Bus
from services.bus.streams import ensure_consumers, ensure_streams
from services.config import Compute, Settings
from services.engine.arithmetic import choose_arithmetic
from services.engine.arithmetics import Arithmetics
from services.engine.loading import load_model
from services.engine.model_config import ModelConfig
from services.models.files import ModelFiles
from services.settings import Bus as BusSettings
from services.text.model import TextModel
from services.worker.runtime import Prepared
from tests.golden.goldens import GOLDENS
from tests.pipeline.earlier_worker import continued, handoff_of, leave
from tests.pipeline.local import LocalPipeline, run_pipeline, settings_for
from tests.pipeline.processes import process
from tests.pipeline.test_both_roles import Client
from tests.pipeline.test_take_over import cuts
from tests.pipeline.tiny import SLUG, tiny_files, tiny_model, tiny_pipeline_text

MIXES = [("float32", "bfloat16"), ("bfloat16", "float32")]
KINDS: list[dict[str, Any]] = [{"temperature": 0.0, "logprobs": 1}, {"top_p": 0.9, "n": 2}]
LENGTHS = (1, 5, 15, 16, 17, 40, 64)  # of prompts; blocks have 16 tokens
JOBS: list[dict[str, Any]] = [
    {"prompt_token_ids": [3 + (5 * length + k) % 200 for k in range(length)], "max_tokens": 40, "seed": 3, **kind}
    | {"ignore_eos": True}
    for length in LENGTHS
    for kind in KINDS
]
LONG = {"prompt_token_ids": JOBS[-1]["prompt_token_ids"][:41], "max_tokens": 400, "seed": 9, "ignore_eos": True}


@asynccontextmanager
async def mixed(url: str, data_dir: Path, prefill: str, decode: str, **groups: Any) -> AsyncIterator[LocalPipeline]:
    kv = {"block_tokens": 16, **groups.pop("kv", {})}
    settings = settings_for(data_dir, kv=kv, bus={"ack_wait_s": 0.6}, **groups)
    models = tiny_model(prefill), tiny_model(decode)
    async with run_pipeline(url, tiny_files(), tiny_pipeline_text(), models, (settings, settings)) as pipeline:
        yield pipeline


@pytest.mark.parametrize(("prefill", "decode"), MIXES)
async def test_the_same_tokens_cold_and_warm_and_from_the_store(broker: str, tmp_path: Path, prefill: str, decode: str):
    async with mixed(broker, tmp_path, prefill, decode) as pipeline:
        cold = await pipeline.ask_all(JOBS)
        warm = await pipeline.ask_all(JOBS)
        pipeline.decode.pool.check_integrity()
    async with mixed(broker, tmp_path, prefill, decode) as pipeline:
        assert not pipeline.decode.pool.num_held
        stored = await pipeline.ask_all(JOBS)
        assert pipeline.prefill.store.counters.hits and pipeline.decode.prompt_store.counters.hits
    for first, second, third in zip(cold, warm, stored, strict=True):
        assert isinstance(first.end, Done)
        assert first.essence == second.essence == third.essence
    assert {answer.start.build for answer in cold} == {pipeline.decode.build} == {pipeline.prefill.build}


async def test_prefill_makes_the_first_token_and_decode_the_others(broker: str, tmp_path: Path):
    """Log-probabilities tell who computed: the first is that of a build of prefill's arithmetic alone."""
    job = JOBS[-2]
    found = {}
    for prefill in ("float32", "bfloat16"):
        for decode in ("float32", "bfloat16"):
            async with mixed(broker, tmp_path / prefill / decode, prefill, decode) as pipeline:
                found[prefill, decode] = (await pipeline.ask(**job)).essence
    assert found["float32", "bfloat16"][0] == found["float32", "float32"][0] != found["bfloat16", "bfloat16"][0]
    assert found["bfloat16", "float32"][0] == found["bfloat16", "bfloat16"][0]
    assert len({msgspec.json.encode(events[1:]) for events in found.values()}) == 4


@pytest.mark.parametrize(("prefill", "decode"), MIXES)
@pytest.mark.parametrize("number", [1, 7, 10])
async def test_taken_over_anywhere(broker: str, tmp_path: Path, prefill: str, decode: str, number: int):
    """With what the dead worker stored, and with nothing stored of what it made: that is computed again, and the
    prompt comes from prefill, if need be a second time."""
    job = JOBS[number]
    async with mixed(broker, tmp_path, prefill, decode) as pipeline:
        whole = await pipeline.ask(**job)
        for cut in cuts(whole.events, job.get("n", 1)):
            for change in ({}, {"salt": f"lost {cut}"}, {"salt": f"never stored {cut}", "stored_blocks": 0}):
                answer = await continued(pipeline, job, whole.events[:cut], **change)
                assert answer.essence == whole.essence, (cut, change)
                assert isinstance(answer.end, Done)


@pytest.mark.parametrize(("prefill", "decode"), MIXES)
@pytest.mark.parametrize("loses_store", [False, True])
async def test_decode_is_killed_in_mid_stream(
    broker: str, tmp_path: Path, prefill: str, decode: str, loses_store: bool
):
    arithmetics = Arithmetics(tiny_model(prefill).arithmetic, tiny_model(decode).arithmetic)
    settings = BusSettings(ack_wait_s=1.0)  # to wait less for the dead
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(await Bus.connect(broker, "client", settings))
        first, victim, second = (
            stack.enter_context(process(role, broker, tmp_path / "kv", prefill, decode))
            for role in ("prefill", "decode", "decode")
        )
        client = Client(bus)
        await ensure_streams(bus, SLUG)
        await ensure_consumers(bus, SLUG, arithmetics.build_of(tiny_files()))
        async with mixed(broker, tmp_path / "reference", prefill, decode):
            name = f"reference-{prefill}-{loses_store}"
            await client.submit(LONG, name)
            expected = await client.read(name)
        name = f"killed-{prefill}-{loses_store}"
        for worker in (first, victim):
            worker.serve()
        seen = await client.begin(LONG, name, 60)
        victim.kill()
        if loses_store:
            for folder in (tmp_path / "kv" / "kv" / "blocks").iterdir():
                shutil.rmtree(folder)
        second.serve()
        answer = await client.read(name)
    assert isinstance(answer.end, Done) and answer.events[: len(seen)] == seen
    assert len(seen) < len(answer.events) - 1, "it was killed before its end"
    assert answer.essence == expected.essence


async def test_a_prompt_that_cannot_be_had_again_ends_the_job(broker: str, tmp_path: Path):
    """After it went back to prefill once."""
    job = JOBS[0] | {"prompt_token_ids": LONG["prompt_token_ids"]}
    async with mixed(broker, tmp_path, "float32", "bfloat16") as pipeline:
        whole = await pipeline.ask(**job)
        for events in (whole.events[:2], whole.events[:20]):
            answer = await continued(pipeline, job, events, salt="gone", reworked=True)
            assert isinstance(answer.end, Error) and answer.end.code == "kv_unavailable"
            assert answer.events[:-1] == events
        handoff = handoff_of(pipeline, job, whole.events[:1], first=[], reworked=True)
        answer = await pipeline.read(await leave(pipeline, handoff, whole.events[:1]))
        assert isinstance(answer.end, Error) and answer.end.code == "kv_unavailable", "decode makes no first token"
        assert pipeline.decode.pool.num_held == 0


async def test_what_decode_made_is_the_jobs_own(broker: str, tmp_path: Path):
    """Two jobs with equal prompts and answers store their own blocks; a build of one arithmetic finds none of them."""
    async with mixed(broker, tmp_path, "float32", "bfloat16") as pipeline:
        before = 0
        for _ in range(2):
            answer = await pipeline.ask(**JOBS[0])
            writes = pipeline.decode.store.counters.writes
            assert writes - before >= 2, "a block of 16 and more of the 40 tokens"
            before = writes
    grown = LONG["prompt_token_ids"] + answer.token_ids()
    async with mixed(broker, tmp_path, "bfloat16", "bfloat16") as pipeline:
        answer = await pipeline.ask(prompt_token_ids=grown, max_tokens=2)
        assert answer.start.cached_tokens == 0


async def test_a_worker_that_leaves_hands_its_jobs_to_the_next(broker: str, tmp_path: Path):
    async with mixed(broker, tmp_path, "float32", "bfloat16", scheduler={"grace_s": 0.05}) as pipeline:
        name = await pipeline.submit(**LONG)
        async with asyncio.timeout(30):
            while not pipeline.decode.store.counters.writes:
                await asyncio.sleep(0.001)
    async with mixed(broker, tmp_path, "float32", "bfloat16") as pipeline:
        answer = await pipeline.read(name)
        again = await pipeline.ask(**LONG)
        assert answer.essence == again.essence and isinstance(answer.end, Done)


@pytest.mark.parametrize(("prefill", "decode"), [("float32", "int8"), ("int8", "float32")])
async def test_integer_and_float32_on_the_real_model(
    broker: str, files: ModelFiles, text: TextModel, tmp_path: Path, prefill: str, decode: str
):
    """Whole numbers on one side only; cold, warm and with nothing left but what is stored."""
    job = GOLDENS["rain for the clerk"].job(max_tokens=12, ignore_eos=True)
    config = ModelConfig.from_hf(files.config)
    models = tuple(load_model(files, choose_arithmetic(config, dtype)) for dtype in (prefill, decode))
    settings = settings_for(tmp_path)
    found = []
    for _ in range(2):
        async with run_pipeline(broker, files, text, (models[0], models[1]), (settings, settings)) as pipeline:
            found += [await pipeline.ask(**job), await pipeline.ask(**job)]
    assert isinstance(found[0].end, Done) and len(found[0].token_ids()) == 12
    assert all(answer.essence == found[0].essence for answer in found)
    assert found[2].start.cached_tokens > 0


def test_each_role_prepares_its_own_arithmetic_and_the_same_build() -> None:
    settings = Settings(compute=Compute(dtype="bfloat16", prefill_dtype="float32"))
    prefill, decode = (Prepared.of(settings, role) for role in ("prefill", "decode"))  # type: ignore[arg-type]
    assert prefill.arithmetic.id == decode.arithmetics.prefill.id != decode.arithmetic.id
    assert prefill.build == decode.build
    plain = Prepared.of(Settings(compute=Compute(dtype="bfloat16", prefill_dtype="bfloat16")), "both")
    assert plain.build == Prepared.of(Settings(compute=Compute(dtype="bfloat16")), "prefill").build != prefill.build
    with pytest.raises(SetupError, match=r"leave compute\.prefill_dtype empty"):
        Prepared.of(settings, "both")
