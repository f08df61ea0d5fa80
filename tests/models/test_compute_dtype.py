"""What `compute.dtype` means for files of all kinds, and what int8 refuses."""

from pathlib import Path

import pytest

from schemas.errors import SetupError
from services.models.compute_dtype import concrete_dtype
from services.models.files import ModelFiles
from services.models.registry import resolve
from tests.models.default_model import default_model
from tests.models.tiny_folder import write_folder


def files_of(*formats: str) -> ModelFiles:
    return ModelFiles(
        name="tiny",
        slug="tiny",
        path=Path(),
        config={},
        fingerprint=b"",
        tokenizer_hash=b"",
        context_tokens=1,
        vocab_size=1,
        eos_ids=(),
        weights=(),
        product_formats=formats,
    )


@pytest.mark.parametrize(
    ("formats", "meant"),
    [
        (("Q4_0",), "int8"),
        (("Q4_1", "Q8_0"), "int8"),
        (("Q4_0", "Q4_1", "Q8_0"), "int8"),
        (("F16", "Q4_0"), "bfloat16"),
        (("F32",), "bfloat16"),
        ((), "bfloat16"),
    ],
)
def test_what_auto_means(formats: tuple[str, ...], meant: str) -> None:
    files = files_of(*formats)
    assert concrete_dtype("auto", files) == meant
    assert concrete_dtype("float32", files) == "float32"
    if meant == "int8":
        assert concrete_dtype("int8", files) == "int8"
    else:
        with pytest.raises(SetupError, match=r"tiny cannot be computed in int8: .*compute\.dtype to auto"):
            concrete_dtype("int8", files)


def test_the_default_model_and_a_folder(tmp_path: Path) -> None:
    assert default_model().product_formats == ("Q4_1", "Q8_0")
    assert concrete_dtype("auto", default_model()) == "int8"
    folder = resolve(str(write_folder(tmp_path / "m")), tmp_path / "data")
    with pytest.raises(SetupError, match="its weights are safetensors"):
        concrete_dtype("int8", folder)
