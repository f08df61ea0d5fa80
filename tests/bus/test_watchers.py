"""Who waits for a job answers when it is asked."""

from services.bus.connection import Bus
from services.bus.server import NatsServer
from services.bus.watchers import WatchAnswers, watcher_of
from tests.bus.conftest import MakeBus


async def test_who_has_the_job_answers(bus: Bus, make_bus: MakeBus, server: NatsServer, job: str) -> None:
    assert await watcher_of(bus, "default", job) is None, "nobody listens"
    first, second = await make_bus(server.url), await make_bus(server.url)
    answers = [
        WatchAnswers(first, lambda tenant, name: False),
        WatchAnswers(second, lambda tenant, name: (tenant, name) == ("default", job)),
    ]
    for answer in answers:
        await answer.start()
    for listener in (first, second):
        await listener.request("$JS.API.INFO")  # answered once the broker has its subscription
    assert await watcher_of(bus, "default", job) == second.name
    assert await watcher_of(bus, "acme", job) is None, "another tenant's job of that id"
    for answer in answers:
        await answer.close()
    assert await watcher_of(bus, "default", job) is None
