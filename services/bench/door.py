"""One streamed answer over HTTP, as a user of the gateway sees its first token come."""

import asyncio
import json
import time
from urllib.parse import urlsplit

from schemas.errors import Internal

PATH = "/v1/completions"


async def ttft_s(base_url: str, body: dict[str, object]) -> float:
    """From the connection to the first token; returns at the end of the answer. Raises `Internal` unless it is whole.

    On a connection of its own, which is what a user who comes has.
    """
    payload = json.dumps({**body, "stream": True}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nConnection: close\r\n"
    address = urlsplit(base_url)
    began_s, first_s, is_whole = time.perf_counter(), 0.0, False
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        while line := await reader.readline():
            if line.startswith(b'data: {"error"'):
                raise Internal(f"the answer ended with an error: {line.decode()}")
            if line.startswith(b"data: {"):
                first_s = first_s or time.perf_counter() - began_s
            is_whole = is_whole or line.startswith(b"data: [DONE]")
    finally:
        writer.close()
    if not first_s or not is_whole:
        raise Internal("the gateway gave no whole answer")
    return first_s
