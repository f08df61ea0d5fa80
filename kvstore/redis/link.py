"""One connection: redis-py makes it (address, TLS, login), then we speak RESP2 on its socket ourselves.

redis-py's parser copies a body several times, and 1.5 MB bodies are all we have: here they go from the socket straight
into the caller's buffers. A link on which anything went wrong half-way is a reply behind: it is closed, never reused.
"""

import contextlib
import select
import socket
import time
from collections.abc import Sequence
from typing import Any

_BUFFER_BYTES = 4096  # replies but bodies fit; of a body that much is copied once more
_MAX_LEFT_OUT_BYTES = 65_536
_MAX_ARRAY = 10_000

Reply = int | bytes | None | list[Any]
Part = bytes | memoryview


class ReplyError(Exception):
    """What the server answered instead, like `OOM command not allowed ...`. The link is in order."""

    @property
    def code(self) -> str:
        return str(self).partition(" ")[0]


class Garbled(Exception):
    """The reply is no RESP2, or not the one that was asked for."""


def command(*words: Part) -> list[Part]:
    """In parts, so that a large last word is not copied."""
    head = b"*%d\r\n" % len(words)
    parts: list[Part] = []
    for word in words:
        head += b"$%d\r\n" % len(word)
        if len(word) > _BUFFER_BYTES:
            parts += [head, word]
            head = b"\r\n"
        else:
            head += bytes(word) + b"\r\n"
    return [*parts, head]


def set_command(key: bytes, parts: Sequence[Part], ttl_ms: int) -> list[Part]:
    """SET of a value in several parts."""
    size = sum(map(len, parts))
    head = b"*5\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(key), key, size)
    life = b"%d" % ttl_ms
    return [head, *parts, b"\r\n$2\r\nPX\r\n$%d\r\n%s\r\n" % (len(life), life)]


class Link:
    """Used by one thread at a time. `OSError` (`TimeoutError` for one) and `Garbled` mean that it must be closed."""

    def __init__(self, connection: Any) -> None:
        """Connects and logs in; raises what redis-py raises. `connection` is redis-py's."""
        self._connection = connection
        connection.connect()
        self._socket: socket.socket = connection._get_socket()
        self._is_plain = type(self._socket) is socket.socket
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._end = 0
        self._until_s = 0.0
        self._num_pending = 0  # replies that were asked for and not read to their end

    @property
    def is_in_order(self) -> bool:
        """Every reply was read to its end, nothing else came, and the other side is there."""
        if self._num_pending or self._start < self._end:
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def begin(self, until_s: float) -> None:
        """What follows is to be done by then (`time.monotonic`)."""
        self._until_s = until_s

    def abort(self) -> None:
        """From another thread: whoever waits on this link gets an `OSError` at once."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.disconnect()

    def send(self, parts: Sequence[Part], num_replies: int) -> None:
        """`num_replies`: how many commands `parts` are. Each reply must be read."""
        self._num_pending += num_replies
        if not self._is_plain:  # TLS has no sendmsg
            self._wait_at_most()
            for part in parts:
                self._socket.sendall(part)
            return
        left = [memoryview(part) for part in parts]
        while left:
            self._wait_at_most()
            sent = self._socket.sendmsg(left[:64])
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if left:
                left[0] = left[0][sent:]

    def replies(self, count: int) -> list[Reply]:
        """Raises the first `ReplyError` among them once all are read."""
        found: list[Reply] = []
        failed: ReplyError | None = None
        for _ in range(count):
            try:
                found.append(self.reply())
            except ReplyError as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return found

    def reply(self) -> Reply:
        found = self._read_reply()
        self._num_pending -= 1
        return found

    def _read_reply(self) -> Reply:
        kind, rest = self._line()
        if kind == b"$":
            size = self._size(rest)
            if size < 0:
                return None
            body = bytearray(size)
            self._read_into(memoryview(body))
            self._skip(2)
            return bytes(body)
        if kind == b"*":
            num = self._size(rest)
            if num > _MAX_ARRAY:
                raise Garbled(f"an array of {num}")
            return [self._read_reply() for _ in range(num)]
        if kind == b":":
            return self._size(rest)
        if kind == b"+":
            return rest
        raise Garbled(f"a reply that begins with {kind!r}")

    def body_into(self, into: Sequence[memoryview]) -> int | None:
        """The reply to a GET, spread over `into`; its whole size. The rest of a much larger one is left unread."""
        kind, rest = self._line()
        if kind != b"$":
            raise Garbled(f"a reply that begins with {kind!r}, not a body")
        size = left = self._size(rest)
        for buffer in into if size > 0 else ():
            part = buffer[:left]
            self._read_into(part)
            left -= len(part)
        if left <= _MAX_LEFT_OUT_BYTES:
            self._skip(left + 2 if size >= 0 else 0)
            self._num_pending -= 1
        return size if size >= 0 else None

    def _line(self) -> tuple[bytes, bytes]:
        """First byte and rest of the next line."""
        while True:
            view = self._buffer[self._start : self._end]
            line, newline, _ = bytes(view[:512]).partition(b"\r\n")
            if newline:
                self._start += len(line) + 2
                break
            if len(view) >= 512:
                raise Garbled("a line without an end")
            self._fill()
        if line[:1] == b"-":
            self._num_pending -= 1
            raise ReplyError(line[1:].decode("utf-8", "replace"))
        return line[:1], line[1:]

    def _size(self, digits: bytes) -> int:
        try:
            return int(digits)
        except ValueError:
            raise Garbled(f"{digits[:20]!r} is no number") from None

    def _read_into(self, target: memoryview) -> None:
        """Fills `target`: what is in the buffer first, the rest from the socket without a detour."""
        buffered = min(len(target), self._end - self._start)
        target[:buffered] = self._buffer[self._start : self._start + buffered]
        self._start += buffered
        rest = target[buffered:]
        while rest:
            rest = rest[self._receive(rest) :]

    def _skip(self, num_bytes: int) -> None:
        while num_bytes:
            if self._start == self._end:
                self._fill()
            passed = min(num_bytes, self._end - self._start)
            self._start += passed
            num_bytes -= passed

    def _fill(self) -> None:
        """More into the buffer."""
        kept = self._end - self._start
        self._buffer[:kept] = bytes(self._buffer[self._start : self._end])
        self._start, self._end = 0, kept
        self._end += self._receive(self._buffer[kept:])

    def _receive(self, target: memoryview) -> int:
        self._wait_at_most()
        size = self._socket.recv_into(target)
        if size == 0:
            raise ConnectionResetError("it closed the connection")
        return size

    def _wait_at_most(self) -> None:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._socket.settimeout(left_s)
