"""The Redis tier: one string a block, `kvrelay:kv:<tenant>:<64 hex digits>`, with a time to live.

Keys have no braces: a cluster spreads them over all its slots, and no command names two keys. Time is counted by the
server's clock; eviction is the server's too, so set maxmemory and maxmemory-policy allkeys-lru there.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from kvstore.counters import TierCounters
from kvstore.patience import Patience
from kvstore.redis.failures import translated
from kvstore.redis.link import Part, Reply, ReplyError, command, set_command
from kvstore.redis.quarantine import MAX_BYTES, RedisQuarantine
from kvstore.redis.servers import Cluster, OneServer, Server, Servers, address
from kvstore.tier import BlobName, Life, check_tenant
from schemas.errors import KvUnavailable

_HEAD_BYTES = 4096  # who has room for no more only wants to see the beginning
_SCAN_COUNT = 1000
_MAX_TTL_MS = 10 * 365 * 86_400_000

T = TypeVar("T")


class RedisTier:
    """Connects at the first use, so that a server which is away now may come later.

    A call ends within `timeout_s`; each step of making a connection (reach it, TLS, login) may take as long before.
    """

    name = "redis"

    def __init__(
        self,
        url: str,
        *,
        is_cluster: bool = False,
        timeout_s: float = 0.5,
        max_ttl_s: float = math.inf,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Raises `SetupError` for a URL that cannot be read."""
        self.counters = TierCounters()
        self.max_ttl_s = max_ttl_s
        self._servers: Servers = Cluster(url, timeout_s) if is_cluster else OneServer(url, timeout_s)
        self._address = address(url)
        self._secret = unquote(urlsplit(url).password or "")
        self._timeout_s = timeout_s
        self._clock = clock
        self.quarantined = RedisQuarantine(self.run)

    def present(self, names: Sequence[BlobName]) -> int:
        """One round trip to each server, however many names and blobs there are."""
        keys = [key_of(name) for name in names]
        found = self._ask([(key, command(b"EXISTS", key)) for key in keys])
        return next((index for index, one in enumerate(found) if one != 1), len(found))

    def read(self, name: BlobName, into: Sequence[memoryview], patience: Patience | None = None) -> int | None:
        """A link whose reader ran out of time or was given up is closed."""
        key = key_of(name)
        if sum(map(len, into)) <= _HEAD_BYTES:
            return self._read_head(key, into)
        with self._translated():
            try:
                return self._at_place(key, lambda server: self._get(server, key, into, patience or Patience()))
            except ReplyError as error:
                if error.code == "WRONGTYPE":
                    return 0  # no blob, so damaged
                raise

    def write(self, name: BlobName, parts: Sequence[memoryview], life: Life) -> None:
        key = key_of(name)
        message = set_command(key, parts, self._ttl_ms(life))
        with self._translated():
            self._at_place(key, lambda server: self._send(server, message, 1))

    def touch(self, name: BlobName, life: Life) -> bool:
        """Reading counts as use here, so only the time to live is prolonged."""
        return self.touch_many([name], [life])[0]

    def touch_many(self, names: Sequence[BlobName], lives: Sequence[Life]) -> list[bool]:
        """In one round trip to each server."""
        questions: list[tuple[bytes, list[Part]]] = []
        for name, life in zip(names, lives, strict=True):
            key = key_of(name)
            questions.append((key, command(b"PEXPIRE", key, b"%d" % self._ttl_ms(life), b"GT")))
            questions.append((key, command(b"EXISTS", key)))
        return [there == 1 for there in self._ask(questions)[1::2]]

    def quarantine(self, name: BlobName) -> None:
        key = key_of(name)
        size, blob = self._damaged(key)
        (removed,) = self.run(key, [command(b"UNLINK", key)])
        if removed != 1:
            return
        self.counters.add(quarantined=1)
        self.quarantined.keep(key, size, blob, self._clock())

    def names(self, tenant: str = "*") -> Iterator[BlobName]:
        """What is there, of one tenant or of all; while others write, it may miss some or name some twice."""
        for _, keys in self._scan(tenant):
            for key in keys:
                if (name := name_of(key)) is not None:
                    yield name

    def erase(self, tenant: str) -> int:
        check_tenant(tenant)
        erased = 0
        for server, keys in self._scan(tenant):
            message = [part for key in keys for word in (b"STRLEN", b"UNLINK") for part in command(word, key)]
            with self._translated():
                replies = self._send(server, message, 2 * len(keys))
            sizes, removed = replies[::2], replies[1::2]
            erased += sum(size for size, gone in zip(sizes, removed, strict=True) if gone and isinstance(size, int))
        return erased + self.quarantined.remove(_prefix(tenant))[1]

    def run(self, key: bytes, commands: Sequence[list[Part]]) -> list[Reply]:
        """Several commands on one key in one round trip."""
        message = [part for parts in commands for part in parts]
        with self._translated():
            return self._at_place(key, lambda server: self._send(server, message, len(commands)))

    def probe(self) -> None:
        """Raises what a read would, or else a write."""
        with self._translated():
            for server in self._servers.all():
                self._send(server, command(b"PING"), 1)
        key = b"kvrelay:probe:%d" % (time.time_ns() % 16_384)
        self.run(key, [set_command(key, [b"x" * 64], 1000)])

    def close(self) -> None:
        self._servers.close()

    def _get(self, server: Server, key: bytes, into: Sequence[memoryview], patience: Patience) -> int | None:
        with server.link(min(self._until_s(), patience.until_s)) as link, patience.watched(link.abort):
            link.send(command(b"GET", key), 1)
            return link.body_into(into)

    def _read_head(self, key: bytes, into: Sequence[memoryview]) -> int | None:
        """Without the rest of the blob. One without bytes cannot be told from none here, and is of no use either."""
        wanted = b"%d" % (sum(map(len, into)) - 1)
        size, head = self.run(key, [command(b"STRLEN", key), command(b"GETRANGE", key, b"0", wanted)])
        assert isinstance(size, int) and isinstance(head, bytes)
        rest = memoryview(head)
        for buffer in into:
            part = min(len(buffer), len(rest))
            buffer[:part], rest = rest[:part], rest[part:]
        return size or None

    def _damaged(self, key: bytes) -> tuple[int, bytes]:
        """Size and bytes of what is to be quarantined; without bytes if it is too large or no string."""
        try:
            (size,) = self.run(key, [command(b"STRLEN", key)])
            assert isinstance(size, int)
            if size > MAX_BYTES:
                return size, b""
            (blob,) = self.run(key, [command(b"GET", key)])
            return size, blob if isinstance(blob, bytes) else b""
        except KvUnavailable as error:
            if isinstance(error.__cause__, ReplyError):
                return 0, b""
            raise

    def _scan(self, tenant: str) -> Iterator[tuple[Server, list[bytes]]]:
        pattern = _prefix(tenant) + b"*"
        with self._translated():
            servers = self._servers.all()
        for server in servers:
            cursor = b"0"
            while True:
                words = [b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % _SCAN_COUNT]
                with self._translated():
                    (reply,) = self._send(server, command(*words), 1)
                assert isinstance(reply, list)
                cursor, keys = reply
                if keys:
                    yield server, keys
                if cursor == b"0":
                    break

    def _send(self, server: Server, message: Sequence[Part], num_replies: int) -> list[Reply]:
        with server.link(self._until_s()) as link:
            link.send(message, num_replies)
            return link.replies(num_replies)

    def _ask(self, questions: Sequence[tuple[bytes, list[Part]]]) -> list[Reply]:
        """Commands, each on one key, in one round trip to each server, all servers at the same time."""
        with self._translated():
            try:
                return self._ask_once(questions)
            except ReplyError as error:
                if error.code != "MOVED" or not self._servers.moved():
                    raise
                return self._ask_once(questions)

    def _ask_once(self, questions: Sequence[tuple[bytes, list[Part]]]) -> list[Reply]:
        of_server: dict[Server, list[int]] = {}
        for index, (key, _) in enumerate(questions):
            of_server.setdefault(self._servers.of(key), []).append(index)
        until_s = self._until_s()
        answers: list[Reply] = [None] * len(questions)
        with ExitStack() as stack:
            links = [(stack.enter_context(server.link(until_s)), mine) for server, mine in of_server.items()]
            for link, mine in links:
                link.send([b"".join(part for i in mine for part in questions[i][1])], len(mine))
            for link, mine in links:
                for i, answer in zip(mine, link.replies(len(mine)), strict=True):
                    answers[i] = answer
        return answers

    def _at_place(self, key: bytes, call: Callable[[Server], T]) -> T:
        """`call` with the server that has `key`; once more if it has moved away."""
        try:
            return call(self._servers.of(key))
        except ReplyError as error:
            if error.code != "MOVED" or not self._servers.moved():
                raise
            return call(self._servers.of(key))

    def _until_s(self) -> float:
        return time.monotonic() + self._timeout_s

    def _ttl_ms(self, life: Life) -> int:
        return max(1, min(_MAX_TTL_MS, int((life.expires_at - self._clock()) * 1000)))

    @contextmanager
    def _translated(self) -> Iterator[None]:
        with translated(self._address, self._timeout_s, self._secret):
            yield


def key_of(name: BlobName) -> bytes:
    return _prefix(name.tenant) + name.key.hex().encode()


def name_of(key: bytes) -> BlobName | None:
    """The blob that lies under a key of the server."""
    with suppress(ValueError):
        _, _, tenant, digits = key.decode("ascii", "replace").split(":", 3)
        name = BlobName(tenant, bytes.fromhex(digits))
        return name if key_of(name) == key else None
    return None


def _prefix(tenant: str) -> bytes:
    return b"kvrelay:kv:%s:" % tenant.encode()
