"""The default model, loaded once a session for each dtype."""

import math
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from kernels.native import crowd
from services.engine.model import Model
from tests.model.make_golden import oracle
from tests.model.tiny import load, save_tiny
from tests.models.default_model import default_model


@pytest.fixture(autouse=True, scope="module")
def all_threads() -> Iterator[None]:
    """A busy machine must not have every pass computed by one thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crowd, "MAX_WAITED", math.inf)
        yield


@pytest.fixture(scope="session")
def default_models() -> Callable[[str], Model]:
    return cache(lambda dtype: load(default_model(), dtype))


@pytest.fixture(scope="session")
def default_oracle() -> torch.nn.Module:
    return oracle(default_model())


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Model]:
    """By dtype and, if not Llama, family."""

    def made(dtype: str, kind: str = "llama") -> Model:
        files, _ = save_tiny(Path(tmp_path_factory.mktemp(kind)), kind=kind)
        return load(files, dtype)

    return cache(made)
