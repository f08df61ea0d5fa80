"""Another engine is measured in turns with ours; one that cannot run says why."""

import os
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from schemas.errors import SetupError
from services.bench.peer import PEERS, Peer, Place
from services.bench.percentiles import percentile
from services.cli import bench as command
from tests.pipeline.tiny import tiny_files

ENV = dict(os.environ)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of random weights with as many token ids as the prompts use."""
    config = LlamaConfig(
        vocab_size=42_000, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def test_a_peer_is_loaded_once_and_measured_again_and_again(folder: Path) -> None:
    with Peer(Place.of("hf", tiny_files(), model=str(folder)), ENV, [0], 1, (2, 20, 3)) as peer:
        assert peer.engine.startswith("transformers")
        for batch in (1, 2, 1):
            rates = peer.measure(batch, 20, 3)
            assert sorted(rates) == ["decode_tok_s", "prefill_tok_s"] and min(rates.values()) > 0


def test_a_peer_that_cannot_start_is_told_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"hf ended in the middle:\n(?s:.*)config.json"):
        Peer(Place.of("hf", tiny_files(), model=str(tmp_path)), ENV, [0], 1, (1, 20, 3))


def test_a_peer_without_an_environment_says_how_to_make_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("llamacpp", "vllm"):
        with pytest.raises(SetupError, match=rf"python3 -m venv .peers/{name}\n +.*pip install"):
            Place.of(name, tiny_files())
        with pytest.raises(SetupError, match=f"--peer-model {name}="):
            Place.of(name, tiny_files(), python=sys.executable)


def test_the_command_knows_the_peers() -> None:
    assert tuple(command.PEERS) == PEERS


@pytest.mark.parametrize(("share", "value"), [(0.5, 50), (0.99, 99), (0.999, 100), (1.0, 100), (0.001, 1)])
def test_percentiles(share: float, value: int) -> None:
    assert percentile(list(range(100, 0, -1)), share) == value
    assert percentile([7.0], share) == 7.0
