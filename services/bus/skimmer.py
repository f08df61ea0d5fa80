"""Reads the messages of listeners off the wire before nats-py's parser does: it costs a third, and they are most.

Only whole `HMSG` messages of numbers that somebody listens to; everything else goes to nats-py in the order it came.
"""

from collections.abc import Callable, Mapping
from typing import Any

from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser

OnRaw = Callable[[bytes, bytes], None]
"""Gets a message's payload, and its headers as they are on the wire."""

MAX_KEPT_BYTES = 65_536  # of a message whose rest is still to come; nats-py puts longer ones together
MIN_WORDS = 5  # HMSG subject number [reply] header-bytes all-bytes
_START = b"HMSG "
_END = b"\r\n"


class SkimmingParser(Parser):
    def __init__(self, client: Any, listeners: Mapping[bytes, OnRaw]) -> None:
        """`listeners` by the number of their subscription, as it is spelled on the wire."""
        super().__init__(client)
        self._listeners = listeners
        self._kept = b""

    def reset(self) -> None:
        super().reset()
        self._kept = b""

    async def parse(self, data: bytes = b"") -> None:
        if self.state == AWAITING_CONTROL_LINE and not self.buf:
            data = self._skim(self._kept + data if self._kept else data)
            if not data:
                return
        await super().parse(data)

    def _skim(self, data: bytes) -> bytes:
        """Hands out what whole messages `data` begins with. Returns what is left for nats-py."""
        self._kept = b""
        at = 0
        while data.startswith(_START, at):
            line_end = data.find(_END, at)
            if line_end < 0:
                break
            words = data[at:line_end].split()
            on_raw = self._listeners.get(words[2]) if len(words) >= MIN_WORDS else None
            if on_raw is None:
                return data[at:]
            start = line_end + len(_END)
            end = start + int(words[-1])
            if len(data) < end + len(_END):
                break
            body = start + int(words[-2])
            on_raw(data[body:end], data[start:body])
            at = end + len(_END)
        rest = data[at:]
        if rest.startswith(_START) and len(rest) < MAX_KEPT_BYTES:
            self._kept = rest
            return b""
        return rest
