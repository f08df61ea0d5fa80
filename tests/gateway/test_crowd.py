"""Thousands of connections that only take up room."""

import asyncio
import resource
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from tests.gateway.conftest import Pipeline

NUM_IDLE = 2000


@pytest.fixture(autouse=True)
def many_files() -> Iterator[None]:
    """Both ends of each connection are in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * NUM_IDLE + 500:
        pytest.fail(
            f"this test needs {2 * NUM_IDLE + 500} open files, and at most {hard} are allowed: raise ulimit -Hn"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * NUM_IDLE + 500), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_2000_idle_connections_are_held_and_requests_are_answered_beside_them(pipeline: Pipeline) -> None:
    address = urlsplit(pipeline.url)
    assert address.hostname is not None and address.port is not None
    halves = [b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n", b"\x16\x03\x01"]
    writers = []
    try:
        for number in range(NUM_IDLE):
            _, writer = await asyncio.open_connection(address.hostname, address.port)
            writers.append(writer)
            writer.write(halves[0] if number % 10 else halves[number // 10 % 3])
        async with pipeline.post(pipeline.chat()) as response:
            assert (await response.json())["choices"][0]["message"]["content"] == "Hello 世界 👋"
        async with pipeline.session.get(f"{pipeline.url}/health") as response:
            assert (await response.json())["open_requests"] == 0
    finally:
        for writer in writers:
            writer.transport.abort()
