"""Other deployments' blobs, forced collisions and hostile blobs in the store: every answer is that of a cold run."""

import logging
import os
import pickle
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import lz4.block
import msgspec
import pytest
from blake3 import blake3

from kvstore import keys
from schemas.blob import DIGESTED_BYTES, HEADER_BYTES
from services.engine.arithmetic import choose_arithmetic
from services.engine.model import Model
from services.engine.reference_model import ReferenceModel
from services.models.files import ModelFiles
from services.worker import runtime
from tests.pipeline.conftest import Pipelines, rounded
from tests.pipeline.local import Answer, LocalPipeline, run_pipeline, settings_for
from tests.pipeline.test_stored_forms import PROMPT, block_files, job
from tests.pipeline.tiny import tiny_files, tiny_models, tiny_pipeline_text

KV = {"block_tokens": 16}


@pytest.fixture(autouse=True)
def nothing_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block comes from the store."""
    monkeypatch.setattr(runtime, "IDLE_CONTEXTS", 0)


@asynccontextmanager
async def deployment(
    broker: str, data_dir: Path, files: ModelFiles, models: tuple[Model, Model], **kv: Any
) -> AsyncIterator[LocalPipeline]:
    settings = settings_for(data_dir, kv={**KV, **kv})
    async with run_pipeline(broker, files, tiny_pipeline_text(), models, (settings, settings)) as pipeline:
        yield pipeline


def files_with(**changes: Any) -> ModelFiles:
    return msgspec.structs.replace(tiny_files(), **changes)


def plain() -> tuple[Model, Model]:
    return tiny_models()[0], tiny_models()[1]


def other_weights() -> tuple[Model, Model]:
    models = ReferenceModel(tiny_files(), plain()[0].arithmetic), ReferenceModel(tiny_files(), plain()[0].arithmetic)
    for model in models:
        model._weights.norm.neg_()
    return models


def other_rope() -> tuple[Model, Model]:
    files = files_with(config={**tiny_files().config, "rope_theta": 500.0})
    return ReferenceModel(files, plain()[0].arithmetic), ReferenceModel(files, plain()[0].arithmetic)


def other_dtype() -> tuple[Model, Model]:
    arithmetic = choose_arithmetic(plain()[0].config, "float32")
    return ReferenceModel(tiny_files(), arithmetic), ReferenceModel(tiny_files(), arithmetic)


def quantised(name: str) -> Callable[[], tuple[Model, Model]]:
    return lambda: (rounded(plain()[0], name), rounded(plain()[1], name))


Change = tuple[Callable[[], tuple[Model, Model]], dict[str, Any], dict[str, Any]]
CHANGES: dict[str, Change] = {
    "dtype": (other_dtype, {}, {}),
    "int8": (quantised("int8"), {}, {}),
    "int4": (quantised("int4"), {}, {}),
    "weights": (other_weights, {"fingerprint": b"weights2"}, {}),
    "rope": (other_rope, {"fingerprint": b"rope-500"}, {}),
    "tokenizer": (plain, {"tokenizer_hash": b"another-"}, {}),
    "block size": (plain, {}, {"block_tokens": 32}),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_another_deployment_on_the_same_store_hits_nothing(
    broker: str, tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture
):
    """CASES 3. And its blobs under our keys, as a faulty writer would leave them, are a miss and one warning."""
    make_models, files_changes, kv = CHANGES[change]
    models, files = make_models(), files_with(**files_changes)
    async with deployment(broker, tmp_path / "own", files, models, **kv) as alone:
        expected = await alone.ask(**job("greedy"))
    async with deployment(broker, tmp_path / "shared", tiny_files(), plain()) as first:
        await first.ask(**job("greedy"))
        assert (await first.ask(**job("greedy"))).start.cached_tokens == 100  # so that caching is on
        theirs = block_files(first, tmp_path / "shared")
    async with deployment(broker, tmp_path / "shared", files, models, **kv) as second:
        answer = await second.ask(**job("greedy"))
        assert answer.start.cached_tokens == 0 and answer.essence == expected.essence
        ours = block_files(second, tmp_path / "shared")
        assert not {file.name for file in ours} & {file.name for file in theirs}
        for mine, other in zip(ours, theirs[:3], strict=False):  # full blocks: a partial one would be too small
            mine.write_bytes(renamed(other.read_bytes(), bytes.fromhex(mine.stem)))
        caplog.clear()
        again = await second.ask(**job("greedy"))
        assert again.start.cached_tokens == 0 and again.essence == expected.essence
        counters = second.prefill.store.counters
        assert counters.mismatched >= 1 and counters.damaged == 0
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING and "mismatch" in r.getMessage()]
    assert 1 <= len(warnings) <= 2  # one a worker and minute


def renamed(blob: bytes, key: bytes) -> bytes:
    """The same blob under another key, its digest made to fit."""
    fields, stored = blob[:64] + key + blob[96:DIGESTED_BYTES], blob[HEADER_BYTES:]
    return fields + blake3(fields + stored).digest() + stored


@pytest.mark.parametrize("num_bits", [0, 8])
async def test_colliding_keys_change_no_answer(
    broker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bits: int
):
    """CASES 5."""
    prompts = [[3 + (number + 7 * i) % 250 for i in range(40)] for number in range(20)]
    jobs = [{"prompt_token_ids": prompt, "max_tokens": 6, "temperature": 0.0} for prompt in prompts]
    async with deployment(broker, tmp_path / "sound", tiny_files(), plain()) as pipeline:
        expected = [answer.essence for answer in await pipeline.ask_all(jobs)]
    real, made = keys.block_key, set()

    def weak(parent: bytes, ids: bytes) -> bytes:
        key = bytes([real(parent, ids)[0] if num_bits else 0]) + bytes(31)
        made.add((key, ids))
        return key

    async with deployment(broker, tmp_path / "weak", tiny_files(), plain()) as pipeline:
        monkeypatch.setattr(keys, "block_key", weak)  # a worker would notice at its start
        for _ in range(2):
            answers = [await pipeline.ask(**each) for each in jobs]
            assert [answer.essence for answer in answers] == expected
        mismatched = pipeline.prefill.store.counters.mismatched + pipeline.decode.store.counters.mismatched
    assert len({key for key, _ in made}) < len(made) and mismatched > 0


class Marker:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return (os.mkdir, (str(self.path),))


def hostile(sound: bytes, marker: Path) -> dict[str, bytes]:
    def head(at: int, value: bytes, stored: bytes = sound[HEADER_BYTES:]) -> bytes:
        fields = bytearray(sound[:DIGESTED_BYTES])
        fields[at : at + len(value)] = value
        return bytes(fields) + blake3(bytes(fields) + stored).digest() + stored

    code = pickle.dumps(Marker(marker))
    bomb = lz4.block.compress(bytes(300_000_000), store_size=False)[:5000]
    bombs = len(bomb).to_bytes(4, "little") + bomb
    return {
        "a pickle": code,
        "a pickle as payload": head(44, len(code).to_bytes(4, "little"), code),
        "2 GiB": head(44, (2**31).to_bytes(4, "little")),
        "65,535 of everything": head(32, b"\xff" * 8),
        "nothing of anything": head(32, bytes(8)),
        "an unknown dtype": head(7, b"\x09"),
        "an unknown codec": head(5, b"\x09"),
        "a bomb": head(44, len(bombs).to_bytes(4, "little"), bombs),
    }


async def test_hostile_blobs_change_no_answer_and_run_nothing(tiny_pipelines: Pipelines, tmp_path: Path):
    """CASES 6, and that the worker takes no memory for what a header claims."""
    marker = tmp_path / "marker"
    async with tiny_pipelines() as pipeline:
        cold: Answer = await pipeline.ask(**job("greedy", max_tokens=3))
        first, *_ = block_files(pipeline, tmp_path, PROMPT)
        sound = first.read_bytes()
        counters = pipeline.prefill.store.counters
        for number, (name, blob) in enumerate(hostile(sound, marker).items()):
            first.write_bytes(blob)
            before = high_water_bytes(reset=True)
            answer = await pipeline.ask(**job("greedy", max_tokens=3))
            assert answer.essence == cold.essence and answer.start.cached_tokens == 0, name
            assert counters.damaged + counters.mismatched == number + 1, name
            assert high_water_bytes() - before < 30_000_000, name
            assert first.read_bytes() == sound, f"{name}: the block was not written again"
    assert not marker.exists()


def high_water_bytes(reset: bool = False) -> int:
    """The most memory that this process had; from now on, with `reset` (Linux)."""
    if reset:
        try:
            Path("/proc/self/clear_refs").write_bytes(b"5")
        except OSError:
            pytest.skip("needs a resettable high-water mark")
    found = re.search(rb"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_bytes())
    return 1024 * int(found[1]) if found else 0
