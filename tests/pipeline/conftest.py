"""Models loaded once a session, a broker once a module, a pipeline on fresh folders for each test that asks."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from schemas.blob import Quantisation
from services.bench.store_codecs import with_quantisation
from services.engine import blocks
from services.engine.arithmetic import choose_arithmetic
from services.engine.loading import load_model
from services.engine.model import Model
from services.engine.model_config import ModelConfig
from services.models.files import ModelFiles
from services.text.model import TextModel, load_text
from tests.bus.throwaway import throwaway_server
from tests.kvstore.valkey import Valkey
from tests.models.default_model import default_model
from tests.pipeline.local import LocalPipeline, run_pipeline, settings_for
from tests.pipeline.tiny import tiny_files, tiny_models, tiny_pipeline_text

Pipelines = Callable[..., AbstractAsyncContextManager[LocalPipeline]]


@cache
def loaded(dtype: str) -> tuple[Model, Model]:
    """Two models, since two workers compute at the same time; each with one thread on these two cores."""
    torch.set_num_threads(1)
    files = default_model()
    arithmetic = choose_arithmetic(ModelConfig.from_hf(files.config), dtype)
    return load_model(files, arithmetic), load_model(files, arithmetic)


@cache
def rounded(model: Model, quantisation: str) -> Model:
    """The same weights with `kv.quantisation`."""
    return with_quantisation(model, Quantisation[quantisation.upper()])


@pytest.fixture(scope="session")
def files() -> ModelFiles:
    return default_model()


@pytest.fixture(scope="session")
def text(files: ModelFiles) -> TextModel:
    return load_text(files)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with throwaway_server(tmp_path_factory.mktemp("nats")) as server:
        yield server.url


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    """One that the test may freeze, fill and kill."""
    server = Valkey(tmp_path / "valkey").start()
    yield server
    server.kill()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model computes a prompt sooner than a busy machine reads it from anywhere; here blocks are waited for."""
    monkeypatch.setattr(blocks, "MIN_FETCH_S", 10.0)


@pytest.fixture
def pipelines(broker: str, files: ModelFiles, text: TextModel, tmp_path: Path) -> Pipelines:
    """`pipelines(dtype, data_dir, group={key: value})`: a pipeline; the same `data_dir` again is a restart.

    With `decode_dir` the workers have separate stores: decode never finds what prefill wrote.
    """

    @asynccontextmanager
    async def start(
        dtype: str = "float32", data_dir: Path = tmp_path, decode_dir: Path | None = None, **groups: dict[str, Any]
    ) -> AsyncIterator[LocalPipeline]:
        settings = settings_for(data_dir, **groups), settings_for(decode_dir or data_dir, **groups)
        first, second = loaded(dtype)
        if quantisation := groups.get("kv", {}).get("quantisation"):
            first, second = rounded(first, quantisation), rounded(second, quantisation)
        async with run_pipeline(broker, files, text, (first, second), settings) as pipeline:
            yield pipeline

    return start


@pytest.fixture
def tiny_pipelines(broker: str, tmp_path: Path) -> Pipelines:
    """`tiny_pipelines(group={key: value})`: a pipeline of the tiny model, with blocks of 16 tokens.

    A worker that goes silent is replaced within a second. `decode_model` stands in for the decode worker's,
    `url` for the module's broker.
    """

    @asynccontextmanager
    async def start(
        decode_model: Model | None = None, url: str = broker, **groups: dict[str, Any]
    ) -> AsyncIterator[LocalPipeline]:
        kv = {"block_tokens": 16, **groups.pop("kv", {})}
        bus = {"ack_wait_s": 0.6, **groups.pop("bus", {})}
        settings = settings_for(tmp_path, kv=kv, bus=bus, **groups)
        first, second = tiny_models()[0], decode_model or tiny_models()[1]
        if quantisation := kv.get("quantisation"):
            first, second = rounded(first, quantisation), rounded(second, quantisation)
        models = (first, second)
        async with run_pipeline(url, tiny_files(), tiny_pipeline_text(), models, (settings, settings)) as pipeline:
            yield pipeline

    return start
