"""A TCP proxy that holds up what the server says, by a time that a test may change at any moment."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator


class DelayingProxy:
    """`delay_s` before each piece of a reply of at most `piece_bytes`."""

    def __init__(self, port: int, delay_s: float, piece_bytes: int = 1 << 20) -> None:
        self._to = ("127.0.0.1", port)
        self.delay_s = delay_s
        self._piece_bytes = piece_bytes
        self.num_links = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._closing = threading.Event()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        self._closing.set()
        for one in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while not self._closing.is_set():
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(self._to)
                except OSError:
                    client.close()
                    continue
                self.num_links += 1
                self._sockets += [client, server]
                for way in ((client, server, False), (server, client, True)):
                    thread = threading.Thread(target=self._carry, args=way, daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _carry(self, source: socket.socket, target: socket.socket, is_reply: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(self._piece_bytes):
                since = time.monotonic()
                while is_reply and time.monotonic() < since + self.delay_s and not self._closing.is_set():
                    time.sleep(min(0.02, max(0.0, since + self.delay_s - time.monotonic())))
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def delayed(port: int, delay_s: float, piece_bytes: int = 1 << 20) -> Iterator[DelayingProxy]:
    proxy = DelayingProxy(port, delay_s, piece_bytes)
    try:
        yield proxy
    finally:
        proxy.close()
