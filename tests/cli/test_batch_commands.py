"""`kvrelay batch` where nothing can run says why, and leaves nothing behind; and where its output goes."""

import asyncio
import errno
import os
from pathlib import Path

import pytest

from schemas.batch import BatchRecord
from schemas.beat import Beat
from schemas.errors import InvalidRequest, JobNotFound, NoWorker, SetupError
from schemas.subjects import RESULTS_STREAM
from services.batch.ordering import new_batch
from services.batch.shelf import Shelf
from services.bus.beats import BeatPublisher
from services.bus.connection import Bus
from services.bus.jetstream import call
from services.settings import Bus as BusSettings
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


@pytest.mark.parametrize("command", [("run",), ("fetch", "--wait")])
@pytest.mark.parametrize(("output", "told"), [("none/out.jsonl", "no folder"), ("pipe", "no file")])
def test_an_output_that_cannot_be_written_is_told_before_anything_else(
    broker: Broker, file: Path, tmp_path: Path, command: tuple[str, ...], output: str, told: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    result = broker.kvrelay("batch", *command, str(file), "-o", str(tmp_path / output))
    assert isinstance(result.exception, SetupError) and told in result.exception.message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "pipe"]


def test_an_output_that_is_a_link_stays_one(broker: Broker, tmp_path: Path) -> None:
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "out.jsonl")
    made = BatchRecord(batch=new_batch("file-1", "/v1/chat/completions", "24h", 1))
    broker.do(lambda bus: Shelf(bus, "default").put_batch(made))
    assert broker.kvrelay("batch", "fetch", made.batch.id, "-o", str(tmp_path / "link.jsonl")).exit_code == 0
    assert (tmp_path / "link.jsonl").is_symlink() and (tmp_path / "out.jsonl").is_file()


def test_an_error_of_a_line_among_others_is_told_in_words(
    broker: Broker, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(*_: object, **options: object) -> int:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail(ValueError("what followed from it")))
            group.create_task(fail(SetupError("the disk is full")))
        return 0

    async def fail(error: Exception) -> None:
        raise error

    monkeypatch.setattr("services.cli.batch_run._run", run)
    result = broker.kvrelay("batch", "run", str(file), "-o", str(tmp_path / "out.jsonl"))
    assert isinstance(result.exception, SetupError) and result.exception.message == "the disk is full"


def test_a_disk_that_refuses_the_output_is_told_in_words(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    made = BatchRecord(batch=new_batch("file-1", "/v1/chat/completions", "24h", 1))
    broker.do(lambda bus: Shelf(bus, "default").put_batch(made))
    monkeypatch.setattr("os.fsync", full)
    result = broker.kvrelay("batch", "fetch", made.batch.id, "-o", str(tmp_path / "out.jsonl"))
    assert isinstance(result.exception, SetupError)
    assert "No space left on device; the answers are kept" in result.exception.message


def test_without_a_gateway_nothing_is_left_to_it(broker: Broker, file: Path) -> None:
    result = broker.kvrelay("batch", "submit", str(file))
    assert isinstance(result.exception, NoWorker) and "no gateway" in result.exception.message


def test_a_submit_leaves_the_streams_as_the_pipeline_made_them(broker: Broker, file: Path) -> None:
    """Its own settings are those of wherever somebody types it."""

    async def submit(bus: Bus) -> int:
        gateway = Beat(process="g", role="gateway", state="ok", model="", running=0, capacity=0, host="h", uptime_s=1)
        publisher = BeatPublisher(bus, lambda: gateway)
        await publisher.start()
        command = ("batch", "submit", str(file), "--set", "bus.results_max_bytes=1000000")
        result = await asyncio.to_thread(broker.kvrelay, *command)
        await publisher.close()
        assert result.exit_code == 0, (result.output, result.exception)
        return int((await call(bus, f"STREAM.INFO.{RESULTS_STREAM}"))["config"]["max_bytes"])

    assert broker.do(submit) == BusSettings().results_max_bytes


@pytest.mark.parametrize("command", ["status", "cancel"])
@pytest.mark.parametrize("name", ["batch_none", "a.*"])
def test_a_batch_that_is_not_there(broker: Broker, command: str, name: str) -> None:
    assert isinstance(broker.kvrelay("batch", command, name).exception, JobNotFound)
