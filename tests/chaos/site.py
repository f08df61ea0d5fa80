"""A whole pipeline of real processes that can be broken at every joint.

`kvrelay up` runs the workers and the gateway; the broker is ours, so that it can be stopped and started as wanted,
and everybody reaches it through a proxy. The KV folder lies on a small disk.
"""

import contextlib
import json
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.bus.connection import Bus
from services.bus.server import NatsServer
from services.supervisor.child import tethered
from services.supervisor.ports import free_port
from tests.chaos.control import Control
from tests.chaos.disk import DISK_BYTES, SmallDisk, small_disk
from tests.chaos.proxy import BrokerProxy
from tests.chaos.up import Up, running_up

STORE_BYTES = 450_000_000  # below the disk's size; a chaos run writes more, so that blocks are evicted all the time
LOG = "up.log"
POOL_BYTES = 800_000_000
assert STORE_BYTES < DISK_BYTES


@dataclass
class Site:
    """`bus` leads to the broker without the proxy: for looking, not for load."""

    up: Up
    broker: NatsServer
    monitor_port: int
    proxy: BrokerProxy
    bus: Bus
    control: Control
    disk: SmallDisk

    def named(self, role: str) -> list[str]:
        """The processes of a role by name, like `decode-0`."""
        return [name for name in self.up.names if name.partition("-")[0] == role]

    @property
    def log(self) -> list[str]:
        """What all processes have logged so far."""
        return (self.up.data_dir / LOG).read_text(encoding="utf-8", errors="replace").splitlines()

    @property
    def complaints(self) -> list[str]:
        """What they have logged as errors. That a worker stands still is none: we paused it."""
        return [line for line in self.log if (" ERROR " in line or "Traceback" in line) and "stands still" not in line]

    def connections(self) -> list[dict[str, Any]]:
        """What the broker knows of each connection: name, number of subscriptions, ..."""
        url = f"http://127.0.0.1:{self.monitor_port}/connz?limit=4096"
        with urllib.request.urlopen(url) as answer:
            found: list[dict[str, Any]] = json.load(answer)["connections"]
        return found


@contextlib.asynccontextmanager
async def running_site(folder: Path, num_decode: int = 2, **env: str) -> AsyncIterator[Site]:
    kv_folder = folder / "kv"
    control = Control(folder, kv_folder)
    monitor_port = free_port("127.0.0.1")
    # The server's own address for monitoring is not among our settings: it is added to its command line.
    wrapper = [*tethered(), "/bin/sh", "-c", f'exec "$@" --http_port {monitor_port}', "sh"]
    settings = {
        "KVRELAY_KV_MAX_BYTES": str(STORE_BYTES),
        "KVRELAY_SCHEDULER_KV_MEMORY_BYTES": str(POOL_BYTES),
        "KVRELAY_API_LOG_LEVEL": "info",
        "KVRELAY_API_NO_WORKER_TIMEOUT_S": "20",
        **control.env,
        **env,
    }
    with small_disk(kv_folder) as disk, NatsServer(folder, wrapper=wrapper) as broker:
        async with BrokerProxy(lambda: int(broker.url.rpartition(":")[2])).running() as proxy:
            workers = ["--decode", str(num_decode), "--nats", proxy.url]
            starting = running_up(folder, *workers, log=folder / LOG, **settings)
            async with starting as up, await Bus.connect(broker.url, "driver") as bus:
                try:
                    yield Site(up, broker, monitor_port, proxy, bus, control, disk)
                finally:
                    control.heal()
                    disk.free()
