"""A broker for commands that talk to one, and a way to run them in this process."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import pytest
from click.testing import CliRunner, Result

from services.bus.connection import Bus
from services.bus.streams import ensure_streams
from services.cli.main import cli
from tests.bus.throwaway import throwaway_server

MODEL = "tiny"
T = TypeVar("T")

_numbers = itertools.count()


class Broker:
    def __init__(self, url: str) -> None:
        self.url = url

    def do(self, work: Callable[[Bus], Awaitable[T]]) -> T:
        """Runs `work` with a connection of its own."""

        async def run() -> T:
            async with await Bus.connect(self.url, "test") as bus:
                return await work(bus)

        return asyncio.run(run())

    def kvrelay(self, *arguments: str, input: str = "") -> Result:
        """Errors of our tree are in `exception`, as the command's `main` gets them."""
        group, command, *rest = arguments
        return CliRunner().invoke(cli, [group, command, "--nats", self.url, *rest], input=input)

    def output(self, *arguments: str, **options: Any) -> str:
        """Of a command that goes well."""
        result = self.kvrelay(*arguments, **options)
        assert result.exit_code == 0, (result.output, result.exception)
        return result.stdout


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with throwaway_server(tmp_path_factory.mktemp("cli")) as server:
        broker = Broker(server.url)
        broker.do(lambda bus: ensure_streams(bus, MODEL))
        yield broker


@pytest.fixture
def job() -> str:
    """An id that no other test uses."""
    return f"job-{next(_numbers)}"
