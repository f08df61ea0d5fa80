"""Which server holds a key, and the connections to each: one server, or the primaries of a Redis Cluster."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry

from kvstore.redis.link import Link
from schemas.errors import SetupError

_MAX_IDLE = 16


class Server:
    """Links to one server; a link that was used without a fault is used again, last in first out. Thread-safe."""

    def __init__(self, pool: redis.ConnectionPool) -> None:
        """`pool` only says how connections are made: it counts those that it makes, and never forgets one."""
        self._connection_class = pool.connection_class
        self._options = pool.connection_kwargs
        self._lock = threading.Lock()
        self._idle: list[Link] = []
        self._is_closed = False

    @contextmanager
    def link(self, until_s: float) -> Iterator[Link]:
        """For one exchange. A link on which it was not finished, for whatever reason, is closed."""
        link = self._take()
        link.begin(until_s)
        try:
            yield link
        finally:
            self._put(link)

    def close(self) -> None:
        """Idle links now, one that is in use at the end of its exchange."""
        with self._lock:
            self._is_closed = True
            links, self._idle = self._idle, []
        for link in links:
            link.close()

    def _take(self) -> Link:
        while True:
            with self._lock:
                link = self._idle.pop() if self._idle else None
            if link is None:
                return Link(self._connection_class(**self._options))
            if link.is_in_order:
                return link
            link.close()

    def _put(self, link: Link) -> None:
        if link.is_in_order:
            with self._lock:
                if len(self._idle) < _MAX_IDLE and not self._is_closed:
                    self._idle.append(link)
                    return
        link.close()


class Servers(Protocol):
    """Made without connecting. Methods raise what redis-py raises."""

    def of(self, key: bytes) -> Server: ...

    def all(self) -> list[Server]: ...

    def moved(self) -> bool:
        """A key was not where it should be: learns the new places. False: there are no others."""

    def close(self) -> None: ...


class OneServer:
    def __init__(self, url: str, timeout_s: float) -> None:
        with _read(url):
            pool = redis.ConnectionPool.from_url(url, **_options(timeout_s))
            pool.connection_class(**pool.connection_kwargs)  # connects later; an option that it lacks is told now
        self._server = Server(pool)

    def of(self, key: bytes) -> Server:
        return self._server

    def all(self) -> list[Server]:
        return [self._server]

    def moved(self) -> bool:
        return False

    def close(self) -> None:
        self._server.close()


class Cluster:
    """redis-py finds the nodes and who has which slots, at the first use and again when a key has moved."""

    def __init__(self, url: str, timeout_s: float) -> None:
        with _read(url):
            redis.ConnectionPool.from_url(url)
        self._url = url
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._client: redis.RedisCluster | None = None
        self._servers: dict[str, Server] = {}

    def of(self, key: bytes) -> Server:
        client = self._connected()
        slot: int = client.keyslot(key)  # type: ignore[no-untyped-call]
        return self._server(client.nodes_manager.get_node_from_slot(slot))

    def all(self) -> list[Server]:
        return [self._server(node) for node in self._connected().get_primaries()]  # type: ignore[no-untyped-call]

    def moved(self) -> bool:
        with self._lock:
            if self._client is not None:
                self._client.nodes_manager.initialize()
        return True

    def close(self) -> None:
        with self._lock:
            for server in self._servers.values():
                server.close()
            if self._client is not None:
                self._client.close()
            self._client, self._servers = None, {}

    def _connected(self) -> redis.RedisCluster:
        with self._lock:
            if self._client is None:
                # A slot that nobody serves must not keep us from the others.
                self._client = redis.RedisCluster.from_url(
                    self._url, **_options(self._timeout_s), require_full_coverage=False
                )
            return self._client

    def _server(self, node: Any) -> Server:
        with self._lock:
            if node.name not in self._servers:
                assert self._client is not None
                pool = self._client.get_redis_connection(node).connection_pool
                self._servers[node.name] = Server(pool)
            return self._servers[node.name]


def address(url: str) -> str:
    """The URL without login and options, for people to read."""
    parts = urlsplit(url)
    return parts.path if parts.scheme == "unix" else parts.netloc.rpartition("@")[2]


def _options(timeout_s: float) -> dict[str, Any]:
    """One try, so that a timeout is a timeout; redis-py would try for up to half a minute."""
    return {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "driver_info": None,
        "protocol": 2,
        "maint_notifications_config": MaintNotificationsConfig(enabled=False),  # they need RESP3
    }


@contextmanager
def _read(url: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError) as error:
        raise SetupError(
            f"kv.redis_url of {address(url) or 'no address'} cannot be used: give it as redis://host:port/0, "
            f"rediss://user:password@host:port/0 or unix:///path/to/socket ({type(error).__name__})",
            param="kv.redis_url",
        ) from None
