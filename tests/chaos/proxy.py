"""A TCP proxy between the processes and the broker, which cuts connections or lets them hang."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

CHUNK_BYTES = 65_536


class Link:
    """One proxied connection. While it is stalled, nothing passes in either direction and nobody is told."""

    def __init__(self, writers: Sequence[asyncio.StreamWriter]) -> None:
        self._writers = writers
        self._open = asyncio.Event()
        self._open.set()

    def cut(self) -> None:
        """A reset on both sides."""
        self._open.set()
        for writer in self._writers:
            writer.transport.abort()

    async def closed(self) -> None:
        for writer in self._writers:
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def stall(self, seconds: float) -> None:
        self._open.clear()
        await asyncio.sleep(seconds)
        self._open.set()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until one side is gone."""
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                await self._open.wait()
                writer.write(data)
                await writer.drain()


class BrokerProxy:
    """`broker_port` is asked for each new connection, so that the broker may move."""

    def __init__(self, broker_port: Callable[[], int]) -> None:
        self._broker_port = broker_port
        self._links: list[Link] = []
        self._server: asyncio.Server | None = None

    @property
    def links(self) -> Sequence[Link]:
        """In the order of their making."""
        return self._links

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["BrokerProxy"]:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield self
        finally:
            self._server.close()
            await self._server.wait_closed()
            while self._links:
                link = self._links[0]
                link.cut()
                await link.closed()
                await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            broker_reader, broker_writer = await asyncio.open_connection("127.0.0.1", self._broker_port())
        except OSError:
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            return
        link = Link([writer, broker_writer])
        self._links.append(link)
        try:
            ways = [(reader, broker_writer), (broker_reader, writer)]
            carrying = [asyncio.create_task(link.carry(*way)) for way in ways]
            await asyncio.wait(carrying, return_when=asyncio.FIRST_COMPLETED)
            for task in carrying:
                task.cancel()
            await asyncio.gather(*carrying, return_exceptions=True)
        finally:
            link.cut()
            await link.closed()
            self._links.remove(link)
