"""`kvrelay schemas` prints and writes what the code makes."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from schemas.asyncapi import documents
from services.cli.schemas import schemas
from services.gateway.openapi import document


def printed(*args: str) -> str:
    done = CliRunner().invoke(schemas, args)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("name", ["asyncapi", "job", "event", "beat", "subjects"])
def test_one_is_printed(name: str) -> None:
    expected = {file.partition(".")[0]: found for file, found in documents().items()}[name]
    assert json.loads(printed(name)) == json.loads(json.dumps(expected))


def test_that_of_http_too() -> None:
    assert json.loads(printed("openapi"))["paths"].keys() == document()["paths"].keys()


def test_all_are_written(tmp_path: Path) -> None:
    assert printed("--write", str(tmp_path / "made")) == ""
    assert {path.name for path in (tmp_path / "made").iterdir()} == documents().keys()


def test_an_unknown_one_is_wrong_usage() -> None:
    assert CliRunner().invoke(schemas, ["jobs"]).exit_code == 2
