"""Every key is documented, and the README says what the code says."""

import tomllib
from pathlib import Path

import pytest

from schemas.errors import BY_CODE, SetupError
from services import config
from services.cli import config_table
from services.config import KEYS

README = Path(__file__).parents[2] / "README.md"
UNITS = {"_s": "s", "_ms": "ms", "_bytes": "bytes", "_tokens": "tokens"}


@pytest.mark.parametrize("name", KEYS)
def test_every_key_has_a_doc_line_and_the_unit_of_its_name(name: str) -> None:
    key = KEYS[name]
    assert key.doc
    for ending, unit in UNITS.items():
        if name.endswith(ending):
            assert key.unit == unit


def test_the_table_in_the_readme_is_up_to_date() -> None:
    page = README.read_text(encoding="utf-8")
    assert config_table.updated(page) == page, "run `make readme`"


def test_every_error_code_is_in_the_readme_with_its_status() -> None:
    page = README.read_text(encoding="utf-8")
    sent = {code: error for code, error in BY_CODE.items() if not issubclass(error, SetupError)}
    missing = [f"| `{code}` | {error.http_status} |" for code, error in sent.items()]
    assert [row for row in missing if row not in page] == []


def test_the_examples_in_the_readme_can_be_loaded(tmp_path: Path) -> None:
    blocks = README.read_text(encoding="utf-8").split("```toml\n")[1:]
    assert blocks
    for block in blocks:
        file = tmp_path / "kvrelay.toml"
        file.write_text(block.partition("```")[0], encoding="utf-8")
        assert config.load(file, env={}) != config.Settings()


def test_a_page_without_a_place_for_the_table_is_refused() -> None:
    with pytest.raises(SetupError, match="no place for the table"):
        config_table.updated("# something else")


def test_what_config_show_prints_is_a_file_that_loads_the_same(tmp_path: Path) -> None:
    overrides = {"compute.model": 'a "b" 日本', "kv.max_bytes": 2_000_000, "api.strict": True, "kv.ttl_s": 700.5}
    loaded = config.read(env={}, overrides=overrides)
    file = tmp_path / "again.toml"
    file.write_text(config_table.toml(loaded), encoding="utf-8")
    assert config.load(file, env={}) == loaded.settings
    assert tomllib.loads(config_table.toml(loaded, changed_only=True))["compute"] == {"model": 'a "b" 日本'}


def test_credentials_in_urls_are_not_shown() -> None:
    loaded = config.read(env={"KVRELAY_BUS_URL": "nats://me:secret@host:4222"})
    assert "secret" not in config_table.toml(loaded)
    assert "nats://***@host:4222" in config_table.toml(loaded)
