"""`kvrelay batch` where nothing can run: it says why, and leaves nothing behind."""

from pathlib import Path

import pytest

from schemas.errors import InvalidRequest, JobNotFound, NoWorker, SetupError
from tests.cli.conftest import Broker

LINE = '{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "messages": []}}\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "in.jsonl"
    made.write_text(LINE, encoding="utf-8")
    return made


def test_a_file_of_which_nothing_runs(broker: Broker, file: Path, tmp_path: Path) -> None:
    file.write_text(LINE * 2, encoding="utf-8")
    result = broker.kvrelay("batch", "run", str(file), "-o", str(tmp_path / "out.jsonl"))
    assert isinstance(result.exception, InvalidRequest) and "lines 1 and 2" in result.exception.message
    assert not (tmp_path / "out.jsonl").exists()


def test_the_input_is_not_overwritten(broker: Broker, file: Path) -> None:
    result = broker.kvrelay("batch", "run", str(file), "-o", str(file))
    assert isinstance(result.exception, SetupError)
    assert file.read_text(encoding="utf-8") == LINE


def test_without_a_gateway_nothing_is_left_to_it(broker: Broker, file: Path) -> None:
    result = broker.kvrelay("batch", "submit", str(file))
    assert isinstance(result.exception, NoWorker) and "no gateway" in result.exception.message


@pytest.mark.parametrize("command", ["status", "cancel"])
@pytest.mark.parametrize("name", ["batch_none", "a.*"])
def test_a_batch_that_is_not_there(broker: Broker, command: str, name: str) -> None:
    assert isinstance(broker.kvrelay("batch", command, name).exception, JobNotFound)
