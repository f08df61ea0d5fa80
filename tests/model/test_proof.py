"""A proof spares the next start the whole self-check, and is believed only where it holds."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from services.engine import proof
from services.engine.model import Model
from services.engine.proof import Proof, Proofs
from services.models.files import ModelFiles
from tests.model.tiny import load, save_tiny
from tests.models.default_model import default_model


@pytest.fixture
def files(tmp_path: Path) -> ModelFiles:
    """A small model that nobody has a golden of."""
    tiny, _ = save_tiny(tmp_path)
    return msgspec.structs.replace(
        default_model(), path=tmp_path, config=tiny.config, weights=tiny.weights, fingerprint=bytes(8)
    )


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A line for each whole check and each choice among the recipes."""
    lines: list[str] = []

    def counted(name: str) -> None:
        real = getattr(proof, name)
        monkeypatch.setattr(proof, name, lambda *given: lines.append(name) or real(*given))

    counted("self_check")
    counted("choose_arithmetic")
    return lines


def start(files: ModelFiles, model: Model, dtype: str = "float32") -> None:
    proofs = Proofs(files, dtype)
    arithmetic = proofs.arithmetic()
    assert (arithmetic.name, arithmetic.id) == (model.arithmetic.name, model.arithmetic.id)
    assert proofs.check(model).sings()


@pytest.fixture
def model(files: ModelFiles) -> Model:
    return load(files, "float32")


def test_the_second_start_believes_the_first(files: ModelFiles, model: Model, checks: list[str]) -> None:
    start(files, model)
    assert checks == ["choose_arithmetic", "self_check"]
    start(files, model)
    assert checks == ["choose_arithmetic", "self_check"]


def test_other_bits_are_checked_whole(
    files: ModelFiles, model: Model, checks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start(files, model)
    monkeypatch.setattr(model._weights.norm, "data", model._weights.norm * 1.001)
    start(files, model)
    assert checks == ["choose_arithmetic", "self_check", "self_check"]


@pytest.fixture
def other_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("change", ["boot", "processor", "switch", "threads", "source"])
def test_other_circumstances_are_proved_anew(
    change: str, files: ModelFiles, model: Model, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    start(files, model)
    patch = request.getfixturevalue("monkeypatch")
    given = tmp_path / "given"
    given.write_bytes(b"model name : another\n\nmodel name : another")
    match change:
        case "boot":
            patch.setattr(proof, "_BOOT_ID", given)
        case "processor":
            patch.setattr(proof, "_CPU_INFO", given)
        case "switch":
            patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
        case "threads":
            request.getfixturevalue("other_threads")
        case "source":
            patch.setattr(proof, "_sources", lambda: iter([b"x = 1"]))
    assert Proofs(files, "float32")._found is None


def test_without_boot_ids_nothing_is_kept(
    files: ModelFiles, model: Model, checks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "_BOOT_ID", tmp_path / "missing")
    start(files, model)
    start(files, model)
    assert checks == 2 * ["choose_arithmetic", "self_check"]
    assert not (tmp_path / proof.FOLDER).exists()


def test_a_proof_that_cannot_be_read_is_none(files: ModelFiles, model: Model, checks: list[str]) -> None:
    start(files, model)
    (path,) = (files.path / proof.FOLDER).iterdir()
    good = path.read_bytes()
    other = msgspec.json.decode(good, type=Proof)
    bad = [b"", good[:-3], b"[]", msgspec.json.encode(msgspec.structs.replace(other, arithmetic_id="xyz"))]
    for number, text in enumerate([*bad, msgspec.json.encode(msgspec.structs.replace(other, arithmetic="unheard of"))]):
        path.write_bytes(text)
        start(files, model)
        assert checks.count("choose_arithmetic") == number + 2
        assert path.read_bytes() == good


def test_a_folder_that_cannot_be_written_costs_only_time(files: ModelFiles, model: Model, checks: list[str]) -> None:
    (files.path / proof.FOLDER).write_bytes(b"a file, not a folder")
    start(files, model)
    start(files, model)
    assert checks == 2 * ["choose_arithmetic", "self_check"]
