"""Three nats-servers on loopback that replicate their streams: killed, frozen and started again one by one."""

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from services.bus.connection import Bus
from services.bus.jetstream import call
from services.bus.server import MAX_STORE, find_binary, read_info
from services.supervisor.ports import free_port

SIZE = 3
READY_TIMEOUT_S = 30.0

_CONFIG = """\
server_name: "{name}"
listen: "127.0.0.1:{port}"
max_payload: 8388608
jetstream {{ store_dir: "{folder}", max_file_store: {max_store} }}
cluster {{ name: "kvrelay", listen: "127.0.0.1:{route}", routes: [{routes}] }}
"""


class Cluster:
    """Made by `running_cluster`. Servers are called `n0`, `n1`, `n2`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports = {f"n{number}": free_port("127.0.0.1") for number in range(SIZE)}
        self._routes = {name: free_port("127.0.0.1") for name in self._ports}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        """All servers, as `bus.url` takes them."""
        return ",".join(f"nats://127.0.0.1:{port}" for port in self._ports.values())

    def start(self, name: str) -> None:
        """Returns once it greets clients; its streams may need some seconds more."""
        folder = self._folder / name
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "nats.conf"
        routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in self._routes.values())
        config.write_text(
            _CONFIG.format(
                name=name, port=self._ports[name], route=self._routes[name], routes=routes, folder=folder / "js",
                max_store=MAX_STORE,
            ),
            encoding="utf-8",
        )  # fmt: skip
        with (folder / "log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [str(find_binary()), "--config", str(config)], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while read_info("127.0.0.1", self._ports[name]) is None:
            assert time.monotonic() < deadline_s and self._processes[name].poll() is None, f"{name} did not start"
            time.sleep(0.05)

    def kill(self, name: str) -> None:
        """SIGKILL; returns once it is gone."""
        self._processes[name].kill()
        self._processes[name].wait()

    def stop(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()

    def others(self, *names: str) -> list[str]:
        return [name for name in self._ports if name not in names]


async def leader_of(bus: Bus, stream: str) -> str:
    """The server that leads a stream, "" while there is none."""
    return str((await call(bus, f"STREAM.INFO.{stream}")).get("cluster", {}).get("leader", ""))


async def num_current(bus: Bus, stream: str) -> int:
    """Replicas that have everything, the leader among them."""
    cluster = (await call(bus, f"STREAM.INFO.{stream}")).get("cluster", {})
    return bool(cluster.get("leader")) + sum(bool(replica.get("current")) for replica in cluster.get("replicas", []))


@contextlib.contextmanager
def running_cluster(folder: Path) -> Iterator[Cluster]:
    cluster = Cluster(folder)
    try:
        for name in cluster.others():
            cluster.start(name)
        yield cluster
    finally:
        cluster.stop()
