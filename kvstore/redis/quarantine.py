"""Where damaged blobs of a Redis go: a few hashes `kvrelay:quarantine:<n>`, kept for a week where there is room."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from kvstore.redis.link import Part, Reply, command
from schemas.errors import KvUnavailable

MAX_QUARANTINED = 16
MAX_BYTES = 16_000_000  # of a blob that is larger only the size is kept
_PREFIX = b"kvrelay:quarantine:"
_LIFE_S = 7 * 86_400

Run = Callable[[bytes, Sequence[list[Part]]], list[Reply]]
"""Several commands on one key in one round trip."""


class RedisQuarantine:
    def __init__(self, run: Run) -> None:
        self._run = run

    def keep(self, key: bytes, size: int, blob: bytes, now: float) -> None:
        """The newest few stay. A server without room for it keeps nothing."""
        with suppress(KvUnavailable):
            (number,) = self._run(_PREFIX + b"last", [command(b"INCR", _PREFIX + b"last")])
            assert isinstance(number, int)
            kept = _kept(number % MAX_QUARANTINED)
            fields = [b"key", key, b"at", b"%d" % int(now), b"size", b"%d" % size, b"blob", blob]
            life = command(b"EXPIRE", kept, b"%d" % _LIFE_S)
            self._run(kept, [command(b"UNLINK", kept), command(b"HSET", kept, *fields), life])

    def contents(self) -> Iterator[tuple[bytes, int, float]]:
        """(key, size, when) of each, in no order."""
        for _, key, at, size in self._fields(b"at", b"size"):
            with suppress(ValueError):
                yield key, int(size), float(at)

    def remove(self, prefix: bytes = b"") -> tuple[int, int]:
        """Those of keys that begin so: how many there were, and their bytes."""
        num, num_bytes = 0, 0
        for kept, key, blob in self._fields(b"blob"):
            if key.startswith(prefix):
                (removed,) = self._run(kept, [command(b"UNLINK", kept)])
                num += removed == 1
                num_bytes += len(blob) if removed == 1 else 0
        return num, num_bytes

    def _fields(self, *names: bytes) -> Iterator[list[bytes]]:
        """Of each blob that is kept: the hash's name, the blob's key, and the values of `names`."""
        for number in range(MAX_QUARANTINED):
            kept = _kept(number)
            (values,) = self._run(kept, [command(b"HMGET", kept, b"key", *names)])
            assert isinstance(values, list)
            if all(isinstance(value, bytes) for value in values):
                yield [kept, *values]


def _kept(number: int) -> bytes:
    return _PREFIX + b"%d" % number
