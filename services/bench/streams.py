"""Many readers of streamed answers, as cheap as can be: what they cost is not what is measured.

A token's text is the time at which it was made, so that each reader sees how long it took to get there.
"""

import asyncio
import json
import re
import socket
import time
from dataclasses import dataclass, field

SMALL_BUFFER_BYTES = 4096  # of a reader that stalls: what it does not read soon waits in the server
_MADE = re.compile(rb'"content":\s?" (\d+)"')


@dataclass
class Reader:
    """One answer's. `late_s`: for each token, from its making to here; `has_begun` with the head of the answer,
    `has_all` with its last token, or when no more can come."""

    num_tokens: int
    late_s: list[float] = field(default_factory=list)
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    has_all: asyncio.Event = field(default_factory=asyncio.Event)
    is_done: bool = False

    async def read(self, port: int, path: str, body: dict[str, object], go_on: asyncio.Event | None = None) -> None:
        """To the end of the answer or of its connection. With `go_on` it stops after the first token, until that is
        set."""
        sock = socket.socket()
        sock.setblocking(False)
        if go_on is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=sock)
        try:
            payload = json.dumps(body).encode()
            head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
            while not self.is_done and (line := await reader.readline()):
                self._take(line)
                if go_on is not None and self.late_s:
                    writer.transport.pause_reading()  # type: ignore[attr-defined]  # a socket's transport has it
                    await go_on.wait()
                    writer.transport.resume_reading()  # type: ignore[attr-defined]
                    go_on = None
        except ConnectionError:
            pass  # cut off: what it got counts
        finally:
            self.has_all.set()
            writer.close()

    def _take(self, line: bytes) -> None:
        self.has_begun.set()
        made = _MADE.search(line)
        if made is not None:
            self.late_s.append((time.monotonic_ns() - int(made[1])) / 1e9)
            if len(self.late_s) == self.num_tokens:
                self.has_all.set()
        elif line.startswith(b"data: [DONE]"):
            self.is_done = True


async def get(port: int, path: str) -> bool:
    """Whether it answers 200."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n".encode())
        return b" 200 " in await reader.readline()
    except ConnectionError:
        return False
    finally:
        writer.close()
