"""`kvrelay bench memory`, `gap`, `warm`, `batch`: they run and print; how fast anything was is not looked at."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.model.tiny import save_tiny
from tests.models.tiny_folder import write_folder

pytestmark = pytest.mark.timeout(300)  # each starts pipelines, for 5 s each and much longer beside other work
VOCAB_SIZE = 500


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that can be served, of random weights."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    sizes = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 512, "eos_token_id": 257}
    files, _ = save_tiny(write_folder(folder), **sizes)
    (folder / "config.json").write_text(json.dumps(files.config), encoding="utf-8")
    (folder / "model.safetensors").unlink()
    files.weights[0].rename(folder / "model.safetensors")
    return folder


def bench(name: str, model: Path, data: Path, *arguments: str) -> list[dict[str, Any]]:
    """The rows that it printed."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "services.cli.main",
        "bench",
        name,
        "--model",
        str(model),
        "--data",
        str(data),
    ]
    done = subprocess.run([*command, *arguments], capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_memory(model: Path, tmp_path: Path) -> None:
    (row,) = bench("memory", model, tmp_path, "--sequences", "2", "--tokens", "160")
    assert (row["sequences"], row["tokens"]) == (2, 160)
    assert row["peak_mb"] > row["bare_torch_mb"] > 0


@pytest.mark.slow
def test_gap(model: Path, tmp_path: Path) -> None:
    rows = bench("gap", model, tmp_path, "--prompt", "100", "--tokens", "60", "--rounds", "1", "--prompts", "3")
    gaps = [row for row in rows if "p99_ms" in row]
    assert [(row["workers"], row["round"]) for row in gaps] == [
        (workers, number) for workers in ("one of each", "both in one") for number in (1, "medians")
    ]
    assert all(row["loaded_p99_ms"] >= row["loaded_p50_ms"] > 0 for row in gaps)
    assert gaps[1]["p99_ratio"] > 0 and gaps[3]["p99_ratio"] > 0
    slowed = [row for row in rows if "decode_slowed_by_ms" in row]
    assert [(row["workers"], row["round"]) for row in slowed] == [("one of each", 1), ("one of each", "medians")]
    assert all(row["prompt_tok_s"] > 0 and row["slowed_prompt_tok_s"] > 0 for row in slowed)
    assert slowed[1]["prompt_ratio"] > 0 and len(rows) == 6


@pytest.mark.slow
def test_warm(model: Path, tmp_path: Path) -> None:
    rows = bench("warm", model, tmp_path, "--prefix", "128", "--new", "4", "--rounds", "1", "--tier", "nvme")
    assert [(row["tier"], row["round"]) for row in rows] == [("nvme", 1), ("nvme", "medians")]
    assert (rows[1]["prefix_tokens"], rows[1]["new_tokens"]) == (128, 4)
    assert all(row["warm_ttft_ms"] > 0 and row["cold_ttft_ms"] > 0 and row["ratio"] > 0 for row in rows)
    assert rows[1]["cost_ms"] > 0


@pytest.mark.slow
def test_batch(model: Path, tmp_path: Path) -> None:
    few = ("--requests", "4", "--rounds", "1", "--prompt", "20", "--line", "100", "--tokens", "20")
    rows = bench("batch", model, tmp_path, *few)
    assert [row["round"] for row in rows] == [1, "all"]
    assert rows[1]["requests"] == 4 and rows[1]["max_beside_p99_ms"] > rows[1]["idle_p99_ms"] > 0
    assert rows[1]["beside_max_ms"] >= rows[1]["beside_p99_ms"] >= rows[1]["beside_p50_ms"] > 0
