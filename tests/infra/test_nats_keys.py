"""Users of NATS who sign with a key, by real nats-servers: with JWTs of an operator, and with keys in their files."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import nkeys
import pytest

from schemas.errors import Forbidden, SetupError
from services.bus.connection import Bus
from services.bus.jetstream import call
from services.client import Client
from services.settings import Bus as BusSettings
from tests.gateway.scripted_worker import ScriptedWorker
from tests.infra.nats_operator import Key, Operator
from tests.infra.sample_nats import SampleNats

MODEL = "tiny"


def served(folder: Path, lines: str) -> SampleNats:
    config = folder / "keys.conf"
    config.write_text("jetstream { store_dir: $NATS_STORE_DIR }\n" + lines, encoding="utf-8")
    return SampleNats(folder, config).start()


@pytest.fixture(scope="module")
def operator() -> Operator:
    return Operator()


@pytest.fixture(scope="module")
def jwt_nats(operator: Operator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SampleNats]:
    server = served(tmp_path_factory.mktemp("jwt"), operator.config)
    yield server
    server.stop()


async def test_a_job_by_users_with_creds_files(jwt_nats: SampleNats, operator: Operator, tmp_path: Path) -> None:
    worker_file, client_file = tmp_path / "worker.creds", tmp_path / "client.creds"
    operator.write_creds(worker_file)
    operator.write_creds(client_file, sub={"deny": ["kvrelay.beat.*"]}, pub={"deny": ["kvrelay.drain.*"]})
    async with await Bus.connect(jwt_nats.url, "worker", BusSettings(creds_file=str(worker_file))) as bus:
        worker = ScriptedWorker(bus, MODEL)
        await worker.start()
        async with await Client.connect(jwt_nats.url, model=MODEL, creds_file=str(client_file)) as client:
            assert await client.text(str((await client.submit(prompt="hi")).id)) == "Hello 世界 👋"
        async with await Bus.connect(jwt_nats.url, "client", BusSettings(creds_file=str(client_file))) as client_bus:
            with pytest.raises(Forbidden):
                await client_bus.request("kvrelay.drain.x", b"{}")
        await worker.close()


async def test_a_user_whose_key_stands_in_the_servers_file(tmp_path: Path) -> None:
    key, stranger = Key(nkeys.PREFIX_BYTE_USER), Key(nkeys.PREFIX_BYTE_USER)
    server = served(tmp_path, f"authorization {{ users: [ {{ nkey: {key.public} }} ] }}\n")
    file = tmp_path / "seed"
    try:
        file.write_text(f"{key.seed}\n", encoding="utf-8")
        async with await Bus.connect(server.url, "known", BusSettings(nkey_file=str(file))) as bus:
            assert "streams" in await call(bus, "INFO")
        file.write_text(stranger.seed, encoding="utf-8")
        with pytest.raises(SetupError, match="no NATS server answers"):
            await Bus.connect(server.url, "stranger", BusSettings(nkey_file=str(file)), timeout_s=0.5)
    finally:
        server.stop()


async def test_another_operators_user_is_refused(jwt_nats: SampleNats, tmp_path: Path) -> None:
    file = tmp_path / "stranger.creds"
    Operator().write_creds(file)
    with pytest.raises(SetupError, match="no NATS server answers"):
        await Bus.connect(jwt_nats.url, "stranger", BusSettings(creds_file=str(file)), timeout_s=0.5)


@pytest.mark.parametrize("damage", ["gone", "cut", "empty", "no seed"])
async def test_a_file_that_breaks_is_read_again_at_the_next_connect(
    jwt_nats: SampleNats, operator: Operator, tmp_path: Path, damage: str
) -> None:
    """Such a file may be half written by who renews it. Whoever waited for it goes on with a new one."""
    file = tmp_path / "user.creds"
    operator.write_creds(file)
    good = file.read_text(encoding="utf-8")
    async with await Bus.connect(jwt_nats.url, "user", BusSettings(creds_file=str(file))) as bus:
        refused = noted(bus, "bus.creds_file")
        if damage == "gone":
            file.unlink()
        else:
            file.write_text({"cut": good[:100], "empty": "", "no seed": good.replace("SEED", "")}[damage], "utf-8")
        await bus._client.force_reconnect()
        await asyncio.wait_for(refused.wait(), 20)
        operator.write_creds(file)
        await bus.wait_connected(20)
        assert "streams" in await call(bus, "INFO")


async def test_so_is_a_password(tmp_path: Path) -> None:
    server = served(tmp_path, 'authorization { users: [ { user: u, password: "right" } ] }\n')
    file = tmp_path / "password"
    file.write_text("right\n", encoding="utf-8")
    try:
        async with await Bus.connect(server.url, "u", BusSettings(user="u", password_file=str(file))) as bus:
            refused = noted(bus, "bus.password_file")
            file.rename(tmp_path / "away")
            await bus._client.force_reconnect()
            await asyncio.wait_for(refused.wait(), 20)
            (tmp_path / "away").rename(file)
            await bus.wait_connected(20)
            assert "streams" in await call(bus, "INFO")
    finally:
        server.stop()


def noted(bus: Bus, words: str) -> asyncio.Event:
    """Set once a connect has failed for a reason of these words."""
    found = asyncio.Event()

    async def note(error: Exception) -> None:
        if words in str(error):
            found.set()

    bus._client._error_cb = note
    return found


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (BusSettings(creds_file="no-such.creds"), r"bus\.creds_file = 'no-such\.creds' cannot be read"),
        (BusSettings(creds_file=__file__), r"bus\.creds_file = .* has no user JWT"),
        (BusSettings(nkey_file=__file__), r"bus\.nkey_file = .* holds no seed"),
        (BusSettings(nkey_file="no-such.nk"), r"bus\.nkey_file = 'no-such\.nk' cannot be read"),
        (BusSettings(nkey_file="a", creds_file="b"), r"bus\.creds_file and bus\.nkey_file: NATS takes one"),
        (BusSettings(nkey_file="a", user="b"), r"bus\.user and bus\.nkey_file: NATS takes one"),
    ],
)
async def test_what_cannot_be_used_is_named(settings: BusSettings, words: str) -> None:
    with pytest.raises(SetupError, match=words):
        await Bus.connect("nats://127.0.0.1:1", "x", settings)


async def test_a_seed_of_an_account_is_no_users(tmp_path: Path) -> None:
    file = tmp_path / "seed"
    file.write_text(Key(nkeys.PREFIX_BYTE_ACCOUNT).seed, encoding="utf-8")
    with pytest.raises(SetupError, match="no user's seed"):
        await Bus.connect("nats://127.0.0.1:1", "x", BusSettings(nkey_file=str(file)))
