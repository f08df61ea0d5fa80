"""What `kvrelay tune` kept is a default: for its machine and subject, below everything that was said."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from schemas.errors import SetupError
from services import config, tuned

VALUES = {"scheduler.chunk_tokens": 128, "scheduler.token_budget": 512, "scheduler.max_sequences": 8}


@pytest.fixture
def data(tmp_path: Path) -> str:
    """A folder with a choice."""
    data = str(tmp_path / "data")
    settings = config.load(env={}, overrides={"kv.data_dir": data})
    assert tuned.keep(settings, VALUES, tuned.machine()) == tmp_path / "data" / "tuned.json"
    return data


def load(data: str, env: dict[str, str] | None = None, **overrides: Any) -> config.Loaded:
    return config.read(env=env or {}, overrides={"kv.data_dir": data, **overrides})


def in_force(loaded: config.Loaded) -> dict[str, Any]:
    return {name: config.value_of(loaded.settings, name) for name in VALUES}


def test_a_choice_that_was_kept_is_in_force_and_says_so(data: str) -> None:
    loaded = load(data)
    assert in_force(loaded) == VALUES
    assert {loaded.sources[name] for name in VALUES} == {f"{data}/tuned.json"}
    child = config.load(env=config.to_env(loaded.settings, {}))
    assert child == loaded.settings


def test_whatever_else_was_said_goes_before_it(data: str, tmp_path: Path) -> None:
    (tmp_path / "kvrelay.toml").write_text("[scheduler]\nmax_sequences = 5\n", encoding="utf-8")
    loaded = load(data, {"KVRELAY_SCHEDULER_CHUNK_TOKENS": "64"}, **{"scheduler.token_budget": 2048})
    assert list(in_force(loaded).values()) == [64, 2048, 5]


def test_it_gives_way_where_it_contradicts_what_was_said(data: str) -> None:
    loaded = load(data, **{"scheduler.token_budget": 64, "scheduler.chunk_tokens": 64})
    assert list(in_force(loaded).values()) == [64, 64, 8]
    with pytest.raises(SetupError, match=r"token_budget = 64 .* at least scheduler\.chunk_tokens = 256 \(from default"):
        load(data, **{"scheduler.token_budget": 64})


@pytest.mark.parametrize(
    "change", [{"compute.dtype": "float32"}, {"compute.model": "other"}, {"kv.quantisation": "int8"}]
)
def test_for_another_subject_it_says_nothing(data: str, change: dict[str, Any]) -> None:
    assert list(in_force(load(data, **change)).values()) == [256, 1024, 16]
    tuned.keep(load(data, **change).settings, VALUES | {"scheduler.max_sequences": 4}, tuned.machine())
    assert load(data, **change).settings.scheduler.max_sequences == 4
    assert in_force(load(data)) == VALUES, "each subject has its own"


def test_on_another_machine_it_says_nothing(data: str) -> None:
    tuned.reset(data)
    tuned.keep(load(data).settings, VALUES, "another processor, 128 cores, 128 usable")
    assert list(in_force(load(data)).values()) == [256, 1024, 16]


def test_tuning_again_replaces_it_and_reset_forgets_it(data: str) -> None:
    tuned.keep(load(data).settings, VALUES | {"scheduler.max_sequences": 4}, tuned.machine())
    assert load(data).settings.scheduler.max_sequences == 4 and len(tuned.read(data)) == 1
    assert tuned.reset(data) and not tuned.reset(data)
    assert list(in_force(load(data)).values()) == [256, 1024, 16]


@pytest.mark.parametrize("text", ["{", "[{}]", '[{"machine": "m", "subject": {}, "values": {"api.port": 1}}]'])
def test_a_file_that_is_no_choice_stops_the_start_and_is_named(data: str, text: str) -> None:
    tuned.path_of(data).write_text(text, encoding="utf-8")
    with pytest.raises(SetupError, match=r"tuned\.json .*remove it"):
        load(data)


def test_a_value_that_no_setting_may_have_is_left_out(data: str) -> None:
    tuned.keep(load(data).settings, VALUES | {"scheduler.max_sequences": 0}, tuned.machine())
    assert list(in_force(load(data)).values()) == [256, 1024, 16]
    assert msgspec.json.decode(tuned.path_of(data).read_bytes())
