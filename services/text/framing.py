"""Messages on a pipe, each behind its length in 4 bytes, little-endian."""

from typing import IO


def read_message(stream: IO[bytes]) -> bytes | None:
    """None at the end of the stream."""
    head = stream.read(4)
    size = int.from_bytes(head, "little")
    data = stream.read(size)
    return data if len(head) == 4 and len(data) == size else None


def write_message(stream: IO[bytes], data: bytes) -> None:
    stream.write(len(data).to_bytes(4, "little") + data)
    stream.flush()
