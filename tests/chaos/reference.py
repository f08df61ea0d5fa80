"""The undisturbed run: each distinct job once, before anything is broken."""

import asyncio
import random

import aiohttp

from services.bus.connection import Bus
from tests.chaos import oracle
from tests.chaos.clients import Clients
from tests.chaos.mix import Kind, Order
from tests.chaos.site import Site


async def references(
    site: Site, bus: Bus, kinds: list[Kind], session: aiohttp.ClientSession
) -> dict[int, oracle.Stream]:
    """The stream of each kind by its number. One goes through HTTP, so that the gateway is warm as well."""
    clients = Clients(bus, site.up.http, session, "reference", random.Random(0))

    async def run(kind: Kind) -> oracle.Stream:
        shown = await clients.run(Order(kind.number, kind, "reference", "nats"))
        assert shown.job is not None
        stream = await oracle.stored_stream(site.bus, shown.job)
        oracle.check_equal(shown.job, stream, stream)
        for choice in stream.choices.values():
            assert len(choice.token_ids) == kind.fields["max_tokens"], "a distinct job that ends too early"
        return stream

    streams = await asyncio.gather(*(run(kind) for kind in kinds))
    await clients.run(Order(0, kinds[0], "reference", "sse"))
    return {kind.number: stream for kind, stream in zip(kinds, streams, strict=True)}
