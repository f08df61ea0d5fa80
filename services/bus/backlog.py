"""Events that wait for their message."""

from collections import deque

import msgspec

from schemas.errors import TooLarge
from schemas.events import Event, Token, encode_events, is_end


class ChainMessage(msgspec.Struct):
    """Encoded events that go together, how many of them are tokens, and the sequence once it is stored."""

    payload: bytes
    tokens: int
    ends: bool
    sequence: int = 0


class Backlog:
    """Encoded events in order; `room_bytes` is what one message takes."""

    def __init__(self, room_bytes: int) -> None:
        self.num_tokens = 0
        self._room_bytes = room_bytes
        self._lines: deque[tuple[bytes, bool, bool]] = deque()  # encoded event, is a token, is the end

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, event: Event) -> bool:
        """Returns whether it is the job's end. Raises `TooLarge` for an event that fits into no message."""
        line = encode_events([event])
        if len(line) > self._room_bytes:
            raise TooLarge(f"an event of {len(line)} bytes does not fit into a message of {self._room_bytes}")
        is_token, ends = type(event) is Token, is_end(event)
        self.num_tokens += is_token
        self._lines.append((line, is_token, ends))
        return ends

    def take(self) -> ChainMessage | None:
        """All that waits, or as much of it as fits into one message."""
        if not self._lines:
            return None
        lines: list[bytes] = []
        room, tokens, ends = self._room_bytes, 0, False
        while self._lines and len(self._lines[0][0]) <= room:
            line, is_token, ends = self._lines.popleft()
            lines.append(line)
            tokens += is_token
            room -= len(line) + 1
        self.num_tokens -= tokens
        return ChainMessage(b"\n".join(lines), tokens, ends)

    def clear(self) -> None:
        self._lines.clear()
        self.num_tokens = 0
