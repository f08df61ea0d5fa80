"""What reading from a server costs without us: a bare loop, and redis-py's own GET. For benchmarks."""

import socket
from collections.abc import Callable, Sequence
from urllib.parse import unquote, urlsplit

import redis

_TIMEOUT_S = 30.0


def bare_reader(url: str, keys: Sequence[bytes], body_bytes: int) -> Callable[[], None]:
    """Reads all of `keys`, bodies of the same size, in one pipeline into one buffer; looks at nothing.

    For a server without login and TLS.
    """
    link = _connect(url)
    question = b"".join(b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(key), key) for key in keys)
    reply_bytes = len(b"$%d\r\n" % body_bytes) + body_bytes + 2
    buffer = memoryview(bytearray(reply_bytes))

    def read() -> None:
        link.sendall(question)
        for _ in keys:
            rest = buffer
            while rest:
                rest = rest[link.recv_into(rest) :]

    return read


def redis_py_reader(url: str, keys: Sequence[bytes]) -> Callable[[], None]:
    client = redis.Redis.from_url(url, socket_timeout=_TIMEOUT_S)

    def read() -> None:
        for key in keys:
            client.get(key)

    return read


def _connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    if parts.scheme == "unix":
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.settimeout(_TIMEOUT_S)
        link.connect(unquote(parts.path))
        return link
    return socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 6379), _TIMEOUT_S)
