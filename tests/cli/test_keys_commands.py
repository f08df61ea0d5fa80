from pathlib import Path

import pytest
from click.testing import CliRunner

from schemas.errors import JobNotFound, SetupError
from services.cli.main import cli
from services.gateway.keys import Keys


def kvrelay(*arguments: str) -> str:
    result = CliRunner().invoke(cli, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_key_from_its_making_to_its_end(tmp_path: Path) -> None:
    file = str(tmp_path / "keys.json")
    key = kvrelay("keys", "add", "--keys", file, "--tenant", "acme", "--name", "web shop").strip()
    kvrelay("keys", "add", "--keys", file, "--tenant", "beta")
    found = Keys(file).check(f"Bearer {key}")
    assert found.tenant == "acme"
    heading, first, second = kvrelay("keys", "ls", "--keys", file).splitlines()
    assert heading.split() == ["ID", "TENANT", "CREATED", "REVOKED", "NAME"]
    assert first.split()[:2] == [found.id, "acme"] and first.endswith("-        web shop")
    assert second.split()[1] == "beta"
    assert key.rpartition("-")[2] not in heading + first + second
    kvrelay("keys", "revoke", "--keys", file, found.id)
    assert kvrelay("keys", "ls", "--keys", file).splitlines()[1].split()[3].endswith("Z")
    with pytest.raises(JobNotFound, match="kvrelay keys ls"):
        kvrelay("keys", "revoke", "--keys", file, "12345678")


def test_the_file_must_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KVRELAY_API_KEYS_FILE", raising=False)
    monkeypatch.chdir(tmp_path)
    for command in ("add", "ls"):
        with pytest.raises(SetupError, match="--keys FILE"):
            kvrelay("keys", command)


@pytest.mark.parametrize("command", [["gateway", "--nats", "nats://127.0.0.1:1"], ["up"]])
def test_nothing_opens_a_door_to_the_network_without_keys(command: list[str], tmp_path: Path) -> None:
    """Neither starts anything first."""
    with pytest.raises(SetupError, match="--insecure"):
        kvrelay(*command, "--host", "0.0.0.0", "--data", str(tmp_path / "data"))
    assert not (tmp_path / "data" / "nats").exists()
