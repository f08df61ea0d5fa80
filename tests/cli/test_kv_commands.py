"""`kvrelay kv`: what an operator sees and may do."""

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from schemas.errors import InvalidRequest, JobNotFound, SetupError
from schemas.job import Job, Message
from services.cli.main import cli
from services.text.model import load_text
from services.text.prompt import resolve_prompt
from tests.cli.test_cli_commands import kvrelay
from tests.kv.shelf import Shelf
from tests.kvstore.blocks import IDENTITY
from tests.models.default_model import DATA_DIR, default_model

IDS = list(range(64))


def run(shelf: Shelf, *arguments: str, input: str = "") -> Result:
    return CliRunner().invoke(cli, ["kv", *arguments, "--data", str(shelf.data_dir)], input=input)


def output(shelf: Shelf, *arguments: str, input: str = "") -> str:
    result = run(shelf, *arguments, input=input)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def lines(shelf: Shelf, *arguments: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output(shelf, *arguments, "--json").splitlines()]


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


def test_ls_filters_sorts_and_limits(shelf: Shelf) -> None:
    shelf.store(IDS)
    refs = shelf.store(IDS, "acme")
    head, *rows = output(shelf, "ls", "--tenant", "acme", "--sort", "tenant").splitlines()
    assert head.split()[:4] == ["KEY", "TIER", "TENANT", "MODEL"]
    assert [row.split()[0] for row in rows] == [ref.key.hex()[:16] for ref in refs]
    assert {"acme", "nvme", "small", "0-15", "bfloat16", "lz4"} <= set(rows[0].split())
    assert len(lines(shelf, "ls", "--limit", "3")) == 3
    assert lines(shelf, "ls", "--unused-for", "1h") == []
    assert len(lines(shelf, "ls", "--model", "small")) == 8
    assert run(shelf, "ls", "--unused-for", "soon").exit_code == click.UsageError.exit_code


def test_show_prints_header_and_life(shelf: Shelf) -> None:
    refs = shelf.store(IDS)
    pin = shelf.pin(IDS)
    shown = output(shelf, "show", refs[1].key.hex()[:12])
    for words in (refs[1].key.hex(), "positions 16-31", f"pin               {pin.id}", "token_hash", "expires"):
        assert words in shown
    assert all("  " in fact.strip() for fact in shown.splitlines()), "a name runs into its value"
    (row,) = lines(shelf, "show", refs[1].key.hex())
    assert row["header"]["position"] == 16 and row["tenant"] == "default"
    assert isinstance(run(shelf, "show", "0" * 64).exception, JobNotFound)


def test_stats_are_readable_and_json(shelf: Shelf) -> None:
    shelf.store(IDS, "acme")
    assert "acme" in output(shelf, "stats") and "RATIO" in output(shelf, "stats")
    (found,) = lines(shelf, "stats")
    assert found["groups"]["tenant"]["acme"]["blocks"] == 4


def test_verify_tells_by_exit_code(shelf: Shelf) -> None:
    refs = shelf.store(IDS)
    assert "0 damaged" in output(shelf, "verify")
    shelf.damage(refs[2])
    found = run(shelf, "verify", "--keep", "--json")
    assert found.exit_code == 1 and json.loads(found.stdout)["damaged"][0]["key"] == refs[2].key.hex()
    found = run(shelf, "verify")
    assert found.exit_code == 1 and "1 damaged" in found.stdout and refs[2].key.hex()[:16] in found.stdout
    assert "0 damaged" in output(shelf, "verify")
    assert "1 quarantined" in output(shelf, "gc")


def test_rm_asks_and_spares_what_is_pinned(shelf: Shelf) -> None:
    refs = shelf.store(IDS)
    shelf.store(IDS, "acme")
    shelf.pin(IDS[:16])
    asked = run(shelf, "rm", "--tenant", "default", input="n\n")
    assert asked.exit_code == 1 and "remove 3 blocks" in asked.stderr
    asked = run(shelf, "rm", "--tenant", "default")
    assert asked.exit_code == 2 and "say --yes" in asked.stderr
    assert len(lines(shelf, "ls")) == 8
    assert (
        "removed 3 blocks" in (said := output(shelf, "rm", "--tenant", "default", "--yes")) and "1 are pinned" in said
    )
    assert shelf.path(refs[0]).exists()
    (row,) = lines(shelf, "rm", "--model", "small", "--yes")
    assert (row["blocks"], row["pinned_left"]) == (4, 1)
    assert run(shelf, "rm").exit_code == 2
    assert run(shelf, "rm", "abc", "--tenant", "acme").exit_code == 2


@pytest.mark.parametrize("command", ["ls", "show", "stats", "verify", "explain", "gc", "rm", "pin", "unpin", "pins"])
def test_every_command_has_help_with_examples(command: str) -> None:
    shown = CliRunner().invoke(cli, ["kv", command, "--help"])
    assert shown.exit_code == 0 and f"  kvrelay kv {command}" in shown.stdout and "--json" in shown.stdout


def test_no_store_is_said_in_one_line(tmp_path: Path) -> None:
    done = kvrelay("kv", "ls", "--data", "nowhere", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("kvrelay: there is no KV store in ") and "--data" in done.stderr
    assert list(tmp_path.iterdir()) == [], "looking makes nothing"


# With the default model's tokenizer


@pytest.fixture
def real(tmp_path: Path) -> Shelf:
    """The store of a worker of the default model, whose blocks are small ones all the same."""
    files = default_model()
    (tmp_path / "models").symlink_to(DATA_DIR / "models")
    identity = {name: getattr(IDENTITY, name) for name in IDENTITY.__struct_fields__}
    identity |= {"fingerprint": files.fingerprint, "tokenizer_hash": files.tokenizer_hash}
    return Shelf(tmp_path, type(IDENTITY)(**identity), files.slug)


BLOCKS_OF_16 = ("--set", "kv.block_tokens=16")
AS_SHELVED = (*BLOCKS_OF_16, "--dtype", "bfloat16")


def chat_ids(*said: tuple[str, str]) -> list[int]:
    return resolve_prompt(
        Job(messages=[Message(role=role, content=content) for role, content in said]),  # type: ignore[arg-type]
        load_text(default_model()),
    )


def test_explain_tokenises_as_the_server_does(real: Shelf, tmp_path: Path) -> None:
    said = [
        ("system", "Be brief, and answer only the question that you were asked."),
        ("user", "Name the capital of France."),
    ]
    ids = chat_ids(*said)
    real.store(ids[:16])
    real.store(ids[:32], "acme")
    arguments = ["explain", said[1][1], "--system", said[0][1], *AS_SHELVED]
    (found,) = lines(real, *arguments)
    assert [block["state"] for block in found["blocks"]][:2] == ["held", "other_tenant"]
    assert (found["prompt_tokens"], found["cached_tokens"]) == (len(ids), 16)
    page = output(real, *arguments)
    assert "in nvme" in page and "other tenant" in page and f"16 of its {len(ids)} tokens" in page
    file = tmp_path / "chat.json"
    file.write_bytes(json.dumps({"messages": [{"role": role, "content": text} for role, text in said]}).encode())
    assert lines(real, "explain", "--messages", str(file), *AS_SHELVED) == [found]
    assert lines(real, "explain", "--tenant", "acme", "--messages", str(file), *AS_SHELVED)[0]["cached_tokens"] == 32


def test_explain_refuses_what_it_cannot_explain(real: Shelf, tmp_path: Path) -> None:
    error = run(real, "explain", "hi").exception
    assert isinstance(error, SetupError) and "blocks of 64 tokens" in error.message
    assert "smollm2-135m-instruct bfloat16 16" in error.message
    assert run(real, "explain").exit_code == 2
    assert run(real, "explain", "hi", "--raw", "--system", "x").exit_code == 2
    file = tmp_path / "chat.json"
    for junk in (b"", b"{", b"3", b"[" * 100_000, b'[{"role": "user"}]'):
        file.write_bytes(junk)
        assert isinstance(run(real, "explain", "--messages", str(file), *BLOCKS_OF_16).exception, InvalidRequest)


def test_a_pin_waits_for_a_pipeline(real: Shelf) -> None:
    text = "Answer every question in one short sentence, and say so when you do not know."
    done = run(real, "pin", "--system", text, *BLOCKS_OF_16)
    assert done.exit_code == 0 and "no pipeline runs" in done.stderr and "0 of 1 blocks" in done.stdout
    (pin,) = lines(real, "pins")
    assert (pin["text"], pin["tenant"], pin["stored"]) == (text, "default", 0)
    assert run(real, "pin", "--system", text, *BLOCKS_OF_16).exit_code == 0
    assert len(lines(real, "pins")) == 1, "the same again"
    turn = chat_ids(("system", text), ("user", "x"))
    refs = real.store(turn[:16])
    assert lines(real, "pins")[0]["stored"] == 1
    assert lines(real, "ls")[0]["pin"] == pin["id"]
    assert output(real, "unpin", pin["id"]) == f"{pin['id']}: unpinned\n"
    assert lines(real, "pins") == [] and real.path(refs[0]).exists()
    assert isinstance(run(real, "unpin", pin["id"]).exception, JobNotFound)


def test_a_pin_is_refused_by_name(real: Shelf) -> None:
    error = run(real, "pin", "--system", "Be brief.").exception
    assert isinstance(error, InvalidRequest) and "nothing to pin" in error.message
    assert run(real, "pin").exit_code == 2
    assert run(real, "pin", "--system", "x", "--prompt", "y").exit_code == 2
    assert run(real, "pin", "--system", "x", "--shared", "--salt", "y").exit_code == 2
    assert run(real, "unpin").exit_code == 2
