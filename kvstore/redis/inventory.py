"""What lies in a Redis or Valkey, for its operator. The server does not say why a block is gone."""

import time
from collections.abc import Callable, Iterator

from kvstore.inventory import Entry, Quarantined, Tidied
from kvstore.redis.link import Reply, command
from kvstore.redis.tier import RedisTier, key_of, name_of
from kvstore.tier import BlobName, Life
from schemas.blob import HEADER_BYTES, BlobHeader, DamagedBlob, parse_header

PIECE_BYTES = 4 << 20


class RedisInventory:
    """Of a tier that its maker closes."""

    name = RedisTier.name

    def __init__(self, tier: RedisTier, clock: Callable[[], float] = time.time) -> None:
        self._tier = tier
        self._clock = clock

    def tenants(self) -> list[str]:
        return sorted({name.tenant for name in self._tier.names()})

    def walk(self, tenant: str | None = None) -> Iterator[Entry]:
        seen = set()  # the server may name a key twice
        for name in self._tier.names() if tenant is None else self._tier.names(tenant):
            if name not in seen and (entry := self.find(name)) is not None:
                seen.add(name)
                yield entry

    def find(self, name: BlobName) -> Entry | None:
        key = key_of(name)
        head = command(b"GETRANGE", key, b"0", b"%d" % (HEADER_BYTES - 1))
        # The idle time comes first: the others count as use.
        asked = [command(b"OBJECT", b"IDLETIME", key), command(b"STRLEN", key), command(b"PTTL", key), head]
        idle_s, size, left_ms, data = self._tier.run(key, asked)
        if not isinstance(left_ms, int) or left_ms == -2:
            return None
        now = self._clock()
        used_at = now - (idle_s if isinstance(idle_s, int) else 0)
        expires_at = now + left_ms / 1000 if left_ms >= 0 else float("inf")
        return Entry(name, size if isinstance(size, int) else 0, Life(used_at, expires_at), _header(data))

    def pieces(self, name: BlobName) -> Iterator[bytes]:
        key, offset, more = key_of(name), 0, True
        while more:
            end = b"%d" % (offset + PIECE_BYTES - 1)
            asked = [command(b"EXISTS", key), command(b"GETRANGE", key, b"%d" % offset, end)]
            there, piece = self._tier.run(key, asked)
            if there != 1 or not isinstance(piece, bytes):
                return
            yield piece
            offset += len(piece)
            more = len(piece) == PIECE_BYTES

    def reason_of(self, name: BlobName) -> str | None:
        return None

    def quarantined(self) -> list[Quarantined]:
        kept = [(at, size, name_of(key)) for key, size, at in self._tier.quarantined.contents()]
        return [Quarantined(name.key, size, at) for at, size, name in sorted(kept, key=lambda k: k[0]) if name]

    def quarantine(self, name: BlobName) -> None:
        self._tier.quarantine(name)

    def remove(self, name: BlobName) -> bool:
        key = key_of(name)
        return self._tier.run(key, [command(b"UNLINK", key)]) == [1]

    def set_life(self, name: BlobName, life: Life) -> bool:
        key, left_ms = key_of(name), int((life.expires_at - self._clock()) * 1000)
        return self._tier.run(key, [command(b"PEXPIRE", key, b"%d" % max(1, left_ms))]) == [1]

    def tidy(self) -> Tidied:
        num, num_bytes = self._tier.quarantined.remove()
        return Tidied(quarantined=num, num_bytes=num_bytes)


def _header(data: Reply) -> BlobHeader | None:
    try:
        return parse_header(data) if isinstance(data, bytes) else None
    except DamagedBlob:
        return None
