"""`kvrelay job`: what it prints, what it ends, and how it says that nothing is known."""

import json
from pathlib import Path

import msgspec
import pytest

from schemas.errors import InvalidRequest, JobNotFound, Poisoned
from schemas.events import Error, Event
from schemas.job_report import JobReport
from schemas.subjects import Lane
from services.bus.chain import fail_job, open_job
from services.bus.connection import Bus
from services.bus.history import read_all
from services.bus.publish import submit_job
from services.bus.replies import ReplyWriter
from services.cli.job_page import page
from tests.bus.events import START, ending, token
from tests.bus.throwaway import throwaway_server
from tests.cli.conftest import MODEL, Broker
from tests.cli.test_cli_commands import kvrelay


async def write(bus: Bus, job: str, *events: Event, claim: str = "prefill.0.1", last: int = 0) -> None:
    """A job that is on its queue and has `events`."""
    origin = await (await submit_job(bus, "default", MODEL, Lane.BATCH, b"{}")).origin(bus)
    writer = ReplyWriter(bus, "default", job, last, claim)
    writer.put(msgspec.structs.replace(START, origin=origin), *events)
    await writer.drained()


def test_a_job_is_shown(broker: Broker, job: str) -> None:
    broker.do(lambda bus: write(bus, job, token(0), token(0, choice=1)))
    shown = broker.output("job", "show", job)
    lines = dict(line.split(maxsplit=1) for line in shown.splitlines())
    assert (lines["state"], lines["model"], lines["worker"]) == ("prefilling", MODEL, "test")
    assert lines["prompt"] == "3 tokens, 0 of them cached" and lines["answer"] == "1 tokens; 1 tokens"
    report = json.loads(broker.output("job", "show", "--json", job))
    assert msgspec.convert(report, JobReport).state == report["state"] == "prefilling"
    assert report["deliveries"][0]["worker"] == "test"


def test_a_job_that_ended(broker: Broker, job: str) -> None:
    broker.do(lambda bus: write(bus, job, token(0), *ending(1)))
    shown = broker.output("job", "show", job)
    assert "state       done" in shown and "1 tokens (length)" in shown and "took" in shown


def test_a_request_is_found_by_the_id_of_its_answer(broker: Broker) -> None:
    key = "0123456789abcdef01234567"
    for prompt in range(2):
        broker.do(lambda bus, prompt=prompt: open_job(bus, "default", f"req-{key}-{prompt}", MODEL))
    shown = broker.output("job", "show", f"cmpl-{key}")
    assert shown.count("state       queued") == 2
    assert broker.output("job", "cancel", f"cmpl-{key}") == f"req-{key}-0: cancelled\nreq-{key}-1: cancelled\n"


def test_what_strangers_wrote_cannot_command_the_terminal(broker: Broker, job: str) -> None:
    broker.do(lambda bus: fail_job(bus, "default", job, InvalidRequest("\x1b[2J bad\n\x07 word é")))
    shown = broker.output("job", "show", job)
    assert "\\x1b[2J bad \\x07 word é" in shown
    assert "\x1b" not in shown


def test_a_tenant_s_jobs_are_its_own(broker: Broker, job: str) -> None:
    broker.do(lambda bus: fail_job(bus, "acme", job, Poisoned("no")))
    assert "failed" in broker.output("job", "show", "--tenant", "acme", job)
    assert isinstance(broker.kvrelay("job", "show", job).exception, JobNotFound)
    assert isinstance(broker.kvrelay("job", "show", "a b").exception, InvalidRequest)


def test_what_nobody_knows_exits_1_and_says_what_may_be(broker: Broker, tmp_path: Path) -> None:
    done = kvrelay("job", "show", "--nats", broker.url, "nothing", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout == "" and done.stderr.startswith("kvrelay: not_found: nothing is known of job nothing of tenant")


def test_where_no_worker_has_ever_run(tmp_path: Path) -> None:
    with throwaway_server(tmp_path) as server:
        empty = Broker(server.url)
        assert isinstance(empty.kvrelay("job", "show", "nothing").exception, JobNotFound)
        assert empty.output("dead", "ls", "--json") == ""


def test_a_job_is_cancelled_once(broker: Broker, job: str) -> None:
    broker.do(lambda bus: write(bus, job, token(0)))
    assert broker.output("job", "cancel", job) == f"{job}: cancelled\n"
    assert broker.output("job", "cancel", job) == f"{job}: had ended already, cancelled\n"
    answer = json.loads(broker.output("job", "cancel", "--json", job))
    assert answer == {"id": job, "tenant": "default", "cancelled": False, "state": "cancelled"}


def test_a_job_that_waits_unseen_is_cancelled_on_demand_only(broker: Broker, job: str) -> None:
    refused = broker.kvrelay("job", "cancel", job)
    assert isinstance(refused.exception, JobNotFound) and "--queued" in refused.exception.message
    assert broker.do(lambda bus: read_all(bus, "default", job)) == [], "a slip of the pen spoils no id"
    assert broker.output("job", "cancel", "--queued", job) == f"{job}: cancelled\n"
    (message,) = broker.do(lambda bus: read_all(bus, "default", job))
    assert isinstance(message.events[0], Error) and message.events[0].code == "cancelled"


@pytest.mark.parametrize("word", ["took", "age"])
def test_a_page_leaves_out_what_is_not_known(word: str) -> None:
    report = JobReport(id="a", tenant="t", state="done" if word == "took" else "queued", age_s=1.5)  # type: ignore[arg-type]
    report = msgspec.convert(msgspec.to_builtins(report), JobReport)
    assert [line.split()[0] for line in page(report).splitlines()] == ["job", "state", word]
