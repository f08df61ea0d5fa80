"""A worker process that is told to go before it serves."""

import asyncio
import json
import signal
import sys
from pathlib import Path

from services.bus.beats import BeatTable
from services.bus.connection import Bus
from services.bus.drain import ask_to_drain
from services.bus.server import NatsServer
from tests.models.default_model import DATA_DIR, default_model


async def test_who_still_loads_leaves_at_once(bus: Bus, server: NatsServer, tmp_path: Path):
    """Exit code 0, and it was never ready: it did not wait for its model."""
    default_model()
    (tmp_path / "models").symlink_to(DATA_DIR / "models")
    await asyncio.gather(*(leaves_at_once(bus, server, tmp_path, how) for how in ("SIGTERM", "drain")))


async def leaves_at_once(bus: Bus, server: NatsServer, tmp_path: Path, how: str) -> None:
    beats, seen = BeatTable(bus), set()
    await beats.start()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "services.cli.main", "decode", "--nats", server.url, "--data", str(tmp_path)
    )

    def note(table: BeatTable) -> bool:
        states = {beat.state for beat in table.alive() if beat.pid == process.pid}
        seen.update(states)
        return bool(states)

    assert await beats.wait_for(note, 60.0)
    name = next(beat.process for beat in beats.alive() if beat.pid == process.pid)
    told = json.loads((await bus.request(f"$SRV.INFO.kvrelay-decode.{name}")).data)
    assert (told["id"], told["metadata"]["state"]) == (name, "warming")
    if how == "SIGTERM":
        process.send_signal(signal.SIGTERM)
    else:
        assert (await ask_to_drain(bus, name)).running == 0
    assert await beats.wait_for(lambda table: not note(table), 60.0)
    assert await asyncio.wait_for(process.wait(), 60.0) == 0
    assert seen == {"warming"}
    last = beats.get(name)
    assert last is not None and last.state == "stopped"
    await beats.close()
