"""The self-check passes on a good model, and finds wrong weights and inexact arithmetic."""

import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from gguf import GGMLQuantizationType

from kernels.int8_arithmetic import Int8Arithmetic
from schemas.errors import SetupError
from services.engine.check import Canary, self_check
from services.engine.loading import load_checked, load_model
from services.engine.model import Files, Model
from services.engine.native_model import NativeModel
from services.engine.reference_model import ReferenceModel
from services.models.compute_dtype import concrete_dtype
from services.models.files import ModelFiles
from services.models.gguf_file import read_gguf
from services.models.gguf_tensors import product_formats, tensors_of
from tests.model.test_families import GGUFS, SIZES
from tests.model.tiny import tiny_model
from tests.model.tiny_gguf_model import save_gguf
from tests.models.default_model import default_model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_the_default_model_agrees_with_its_golden(
    dtype: str, default_models: Callable[[str], Model], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert self_check(default_models(dtype), default_model()).sings()
    assert "of the golden" in caplog.text


def test_without_a_golden_only_exactness_is_checked(
    tiny_models: Callable[[str], Model], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    unknown = msgspec.structs.replace(default_model(), fingerprint=bytes(8))
    self_check(tiny_models("bfloat16"), unknown)
    assert "no golden for this model" in caplog.text


def test_wrong_weights_are_found(default_models: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch) -> None:
    model = default_models("float32")
    layer = model._weights.layers[17]
    monkeypatch.setattr(layer.mlp_norm, "data", layer.mlp_norm * 1.001)
    with pytest.raises(SetupError, match="from what transformers computes"):
        self_check(model, default_model())


def test_inexact_arithmetic_is_found(tiny_models: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_models("float32")
    unknown = msgspec.structs.replace(default_model(), fingerprint=bytes(8))
    exact = model._weights.head
    monkeypatch.setattr(model, "_weights", _with_head(model, lambda x: exact(x) + 1e-6 * x.shape[0]))
    with pytest.raises(SetupError, match="depend on how its prompt was computed"):
        self_check(model, unknown)


def _with_head(model: Model, head: Callable[[torch.Tensor], torch.Tensor]) -> object:
    weights = model._weights
    return type(weights)(weights.embedding, weights.layers, weights.norm, head)


def test_a_canary_notices_a_changed_weight(tiny_models: Callable[[str], Model]) -> None:
    model = tiny_models("float32")
    canary = Canary(model, [1, 2, 3, 4, 5])
    assert canary.sings()
    norm = model._weights.norm
    kept = norm[3].clone()
    norm[3] += 1e-3
    assert not canary.sings()
    norm[3] = kept
    assert canary.sings()


def damaged(files: Files, arithmetic: Any) -> NativeModel:
    """One bit of one packed weight is another than in the file."""
    model = NativeModel(files, arithmetic)
    model.layers[-1].down.packed()[1234] ^= 1
    return model


def test_a_flipped_bit_of_a_packed_weight_is_found() -> None:
    files = default_model()
    with pytest.raises(SetupError, match="does not compute what its definition says"):
        self_check(damaged(files, Int8Arithmetic()), files)


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> ModelFiles:
    settings, extra = GGUFS["llama"]
    saved = save_gguf(tmp_path / "tiny.gguf", tiny_model(**{**SIZES, **settings}), GGMLQuantizationType.Q4_1, extra)
    return msgspec.structs.replace(default_model(), config=saved.config, weights=saved.weights, fingerprint=bytes(8))


def test_a_damaged_native_step_is_replaced_by_the_plain_one(
    tiny_gguf: ModelFiles, caplog: pytest.LogCaptureFixture
) -> None:
    arithmetic, check = Int8Arithmetic(), partial(self_check, files=tiny_gguf)
    model, canary, trouble = load_checked(tiny_gguf, arithmetic, check, damaged)
    assert isinstance(model, ReferenceModel) and model.arithmetic.id == arithmetic.id
    assert "reference implementation" in trouble and canary.sings()
    alarms = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert len(alarms) == 2 and all(alarm.startswith("ALARM") for alarm in alarms)
    sound, same_canary, nothing = load_checked(tiny_gguf, arithmetic, check)
    assert isinstance(sound, NativeModel) and nothing == "" and same_canary.digest == canary.digest


def test_when_the_plain_one_fails_too_the_worker_does_not_start(
    tiny_gguf: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its products give other bits in chunks of another size."""
    product = ReferenceModel._layer

    def by_rows(self: ReferenceModel, x: torch.Tensor, *others: Any) -> torch.Tensor:
        return product(self, x, *others) + 1e-3 * x.shape[0]

    monkeypatch.setattr(ReferenceModel, "_layer", by_rows)
    with pytest.raises(SetupError, match="depend on how its prompt was computed"):
        load_checked(tiny_gguf, Int8Arithmetic(), partial(self_check, files=tiny_gguf))


def test_a_wrong_weight_in_the_file_is_found(tmp_path: Path) -> None:
    """The steps of all implementations agree on it: only `transformers`' logits tell."""
    files = default_model()
    (path,) = files.weights
    copy = tmp_path / "damaged.gguf"
    shutil.copyfile(path, copy)
    tensor = read_gguf(path).tensors["blk.12.ffn_down.weight"]
    with copy.open("r+b") as file:
        file.seek(tensor.start + 1)  # the high byte of the first block's scale
        (byte,) = file.read(1)
        file.seek(tensor.start + 1)
        file.write(bytes([byte ^ 0x40]))  # 65,536 times as large
    wrong = msgspec.structs.replace(files, weights=(copy,))
    with pytest.raises(SetupError, match="from what transformers computes"):
        self_check(load_model(wrong, Int8Arithmetic()), wrong)


def with_own_formats(files: Files) -> ModelFiles:
    """As the registry tells them of a GGUF."""
    tensors = tensors_of(read_gguf(files.weights[0]), files.config)
    formats = tuple(product_formats(tensors, files.config))
    return msgspec.structs.replace(default_model(), product_formats=formats)


def test_auto_is_int8_for_whole_numbers_and_bfloat16_for_the_rest(tiny_gguf: ModelFiles, tmp_path: Path) -> None:
    settings, extra = GGUFS["llama"]
    plain = save_gguf(tmp_path / "plain.gguf", tiny_model(**{**SIZES, **settings}), GGMLQuantizationType.F16, extra)
    all_files = [with_own_formats(files) for files in (default_model(), tiny_gguf, plain)]
    assert [concrete_dtype("auto", files) for files in all_files] == ["int8", "int8", "bfloat16"]
    assert concrete_dtype("float32", default_model()) == "float32"
