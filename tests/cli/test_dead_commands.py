"""`kvrelay dead`: the operator's way from a job that was given up to one that runs, or to none."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from schemas.errors import IdConflict, JobNotFound, KvrelayError, Poisoned
from schemas.subjects import DEAD_STREAM, Lane, Stage, prefill_subject, stream_name
from schemas.wire import encode
from services.bus.burial import GivenUp, bury
from services.bus.connection import Bus
from services.bus.jetstream import call
from tests.cli.conftest import MODEL, Broker
from tests.cli.test_cli_commands import kvrelay

JOB = encode({"prompt": "Once", "max_tokens": 3})

_numbers = itertools.count(1)


@pytest.fixture(autouse=True)
def nothing_is_left(broker: Broker) -> Iterator[None]:
    yield
    for stream in (DEAD_STREAM, stream_name(Stage.PREFILL, MODEL)):
        broker.do(lambda bus, stream=stream: call(bus, f"STREAM.PURGE.{stream}"))


def dead(
    broker: Broker, job: str, payload: bytes = JOB, error: KvrelayError | None = None, tenant: str = "default"
) -> None:
    async def kept(bus: Bus) -> None:
        given_up = GivenUp(payload, prefill_subject(tenant, MODEL, Lane.BATCH), f"{next(_numbers)}-1", 4)
        await bury(bus, tenant, job, given_up, error or Poisoned("three times alone"))

    broker.do(kept)


def listed(broker: Broker, *options: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in broker.output("dead", "ls", "--json", *options).splitlines()]


def num_queued(broker: Broker) -> int:
    info = broker.do(lambda bus: call(bus, f"STREAM.INFO.{stream_name(Stage.PREFILL, MODEL)}"))
    return int(info["state"]["messages"])


def test_letters_are_listed_and_chosen(broker: Broker) -> None:
    dead(broker, "one", tenant="acme")
    dead(broker, "two", b"{", IdConflict("taken \x1b[2J by another"))
    head, first, second = broker.output("dead", "ls").splitlines()
    assert head.split()[:4] == ["SEQ", "WHEN", "TENANT", "ID"]
    assert {"acme", "one", "poisoned", "4", str(len(JOB))} <= set(first.split())
    assert "id_conflict" in second and "taken \\x1b[2J by another" in second
    assert [letter["id"] for letter in listed(broker, "--tenant", "acme")] == ["one"]
    assert [letter["id"] for letter in listed(broker, "--code", "id_conflict")] == ["two"]
    assert listed(broker, "--tenant", "nobody") == []
    letter = listed(broker)[0]
    assert (letter["deliveries"], letter["bytes"], letter["truncated"]) == (4, len(JOB), False)


def test_a_letter_is_shown_with_all_that_is_stored(broker: Broker) -> None:
    dead(broker, "one")
    shown = broker.output("dead", "show", "one")
    assert "Kvrelay-Code: poisoned\n" in shown and "Kvrelay-Deliveries: 4\n" in shown
    assert '{\n  "prompt": "Once",\n  "max_tokens": 3\n}' in shown
    assert json.loads(broker.output("dead", "show", "--json", "one"))["payload"] == json.loads(JOB)


@pytest.mark.parametrize(
    ("payload", "shown"),
    [
        (b"\x00\x1b]0;x\x07\xff\xc3\xa9{", "\\x00\\x1b]0;x\\x07\\xffé{"),
        (b'{"a": "\xc2\x9b2J"}', '"a": "\\x9b2J"'),
        (b'{"a": "\xff"}', '{"a": "\\xff"}'),
        (b"[" * 100_000, "and 95904 bytes more"),
        (b"", ""),
    ],
)
def test_junk_is_shown_safely(broker: Broker, payload: bytes, shown: str) -> None:
    dead(broker, "junk", payload)
    text = broker.output("dead", "show", "junk")
    assert shown in text
    assert all(c.isprintable() or c == "\n" for c in text)
    json.loads(broker.output("dead", "show", "--json", "junk"))


def test_a_retry_prints_the_new_id_and_removes_the_letter(broker: Broker) -> None:
    dead(broker, "one")
    assert broker.output("dead", "retry", "one") == "one -> one-r1\n"
    assert (listed(broker), num_queued(broker)) == ([], 1)


def test_what_cannot_be_retried_stays_and_holds_up_nobody(broker: Broker, tmp_path: Path) -> None:
    dead(broker, "bad", b"\xff")
    dead(broker, "good")
    done = kvrelay("dead", "retry", "--nats", broker.url, "--all", "--yes", "--json", cwd=tmp_path)
    assert done.returncode == 1
    assert json.loads(done.stdout)["new_id"] == "good-r1"
    assert "bad (--seq " in done.stderr and "not UTF-8" in done.stderr and "1 of 2 dead letters" in done.stderr
    assert [letter["id"] for letter in listed(broker)] == ["bad"]


def test_all_is_asked_about_first(broker: Broker) -> None:
    for job in ("one", "two"):
        dead(broker, job)
    asked = broker.kvrelay("dead", "drop", "--all", input="n\n")
    assert asked.exit_code == 1 and "drop 2 dead letters?" in asked.stderr
    asked = broker.kvrelay("dead", "drop", "--all")
    assert asked.exit_code == 2 and "say --yes where nobody can answer" in asked.stderr
    assert len(listed(broker)) == 2
    assert broker.output("dead", "drop", "--all", input="y\n") == "one: dropped\ntwo: dropped\n"
    assert broker.output("dead", "drop", "--all") == "", "nothing to ask about"


def test_all_of_a_tenant_or_code(broker: Broker) -> None:
    dead(broker, "one", tenant="acme")
    dead(broker, "two", error=IdConflict("taken"))
    dead(broker, "three")
    assert broker.output("dead", "drop", "--all", "--yes", "--tenant", "acme") == "one: dropped\n"
    assert broker.output("dead", "retry", "--all", "--yes", "--code", "id_conflict") == "two -> two-r1\n"
    assert [letter["id"] for letter in listed(broker)] == ["three"]


def test_one_of_several_letters_of_a_job(broker: Broker) -> None:
    dead(broker, "one")
    dead(broker, "one", encode({"prompt": "another"}), IdConflict("taken"))
    first, second = listed(broker)
    assert broker.output("dead", "show", "one").count("Kvrelay-Code") == 2
    assert broker.output("dead", "drop", "--seq", str(first["seq"])) == "one: dropped\n"
    assert listed(broker) == [second]


def test_one_id_of_two_tenants_must_be_told_apart(broker: Broker) -> None:
    for tenant in ("acme", "default"):
        dead(broker, "one", tenant=tenant)
    refused = broker.kvrelay("dead", "drop", "one")
    assert refused.exit_code == click.UsageError.exit_code and "--tenant acme or --tenant default" in refused.stderr
    assert broker.output("dead", "drop", "one", "--tenant", "acme") == "one: dropped\n"


@pytest.mark.parametrize("arguments", [["show", "none"], ["retry", "none"], ["drop", "--seq", "99999"]])
def test_no_such_letter(broker: Broker, arguments: list[str]) -> None:
    error = broker.kvrelay("dead", *arguments).exception
    assert isinstance(error, JobNotFound) and arguments[-1] in error.message
