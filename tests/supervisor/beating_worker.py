"""A worker that only beats: `python beating_worker.py <nats url> <role> <text> <file>`; leaves its mark in `file`."""

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

from schemas.beat import Beat
from services.bus.beats import BeatPublisher
from services.bus.connection import Bus


async def main(url: str, role: str, text: str, file: str) -> None:
    told_to_go = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told_to_go.set)

    def beat() -> Beat:
        return Beat(
            process=f"{role}-{os.getpid()}",
            role=role,
            state="ok",
            text=text,
            host=socket.gethostname(),
            pid=os.getpid(),
        )  # type: ignore[arg-type]

    async with await Bus.connect(url, role) as bus:
        publisher = BeatPublisher(bus, beat)
        await publisher.start()
        await told_to_go.wait()
        leave_mark(Path(file), f"{role} {os.getpid()}\n")
        await publisher.close()


def leave_mark(file: Path, line: str) -> None:
    with file.open("a", encoding="utf-8") as log:
        log.write(line)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
