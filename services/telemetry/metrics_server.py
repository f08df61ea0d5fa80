"""The Prometheus endpoint: an HTTP server in a thread that sleeps until it is asked.

`prometheus_client.start_http_server` wakes twice a second to see whether it should stop, in each idle process.
"""

import contextlib
import socket
import threading
from http.server import ThreadingHTTPServer

import prometheus_client

WAKE_TIMEOUT_S = 1.0


class _Server(ThreadingHTTPServer):
    closing = False

    def verify_request(self, request: object, client_address: object) -> bool:
        return not self.closing


class MetricsServer:
    """Serves `registry` from its making to `close`. Raises `OSError` if the port cannot be had; 0 is any free one."""

    def __init__(self, host: str, port: int, registry: prometheus_client.CollectorRegistry) -> None:
        class Server(_Server):
            address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]

        self._server = Server((host, port), prometheus_client.MetricsHandler.factory(registry))
        self._host, self.port = host, self._server.server_port
        self._thread = threading.Thread(target=self._serve, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Returns when the thread is gone."""
        self._server.closing = True
        with contextlib.suppress(OSError), socket.create_connection((self._host, self.port), WAKE_TIMEOUT_S):
            pass  # the thread wakes, and sees that it is over
        self._thread.join()
        self._server.server_close()

    def _serve(self) -> None:
        while not self._server.closing:
            self._server.handle_request()
