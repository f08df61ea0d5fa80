"""A worker is asked over NATS to leave, by its name."""

import pytest

from schemas.drain import DrainReply
from schemas.errors import NoWorker
from services.bus.connection import Bus
from services.bus.drain import DrainListener, ask_to_drain
from services.bus.server import NatsServer
from tests.bus.conftest import MakeBus


async def test_only_the_one_that_is_named_is_told(bus: Bus, make_bus: MakeBus, server: NatsServer) -> None:
    asked: list[str] = []

    def ear(name: str) -> DrainListener:
        def on_drain() -> DrainReply:
            asked.append(name)
            return DrainReply(process=name, grace_s=5.0, running=2)

        return DrainListener(bus, name, on_drain)

    ears = [ear("decode-1"), ear("decode-2")]
    for one in ears:
        await one.start()
    client = await make_bus(server.url)
    for _ in range(2):
        assert await ask_to_drain(client, "decode-2") == DrainReply(process="decode-2", grace_s=5.0, running=2)
    assert asked == ["decode-2", "decode-2"]
    await ears[1].close()
    with pytest.raises(NoWorker):
        await ask_to_drain(bus, "nobody")  # behind the unsubscription, on the same connection
    with pytest.raises(NoWorker, match="decode-2"):
        await ask_to_drain(client, "decode-2")
