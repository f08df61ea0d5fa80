"""The gateway's parts put together, from a connected bus to an open port and back."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Mapping

from aiohttp import web

from schemas.beat import Beat, ProcessState
from schemas.errors import SetupError
from services.batch.keeper import BatchKeeper
from services.batch.run import Setting
from services.batch.sweeping import Sweeper
from services.batch.throttle import Throttle
from services.bus.beats import BeatPublisher, BeatTable
from services.bus.connection import Bus
from services.bus.micro import MicroService
from services.bus.watchers import WatchAnswers
from services.gateway.batches import Batches
from services.gateway.catalog import Catalog
from services.gateway.connection import GatewayRunner
from services.gateway.exchange import Exchange
from services.gateway.exposure import tls_context
from services.gateway.files import Files
from services.gateway.generation import Generation
from services.gateway.keys import Keys, identified
from services.gateway.listing import Listing
from services.gateway.readiness import Readiness
from services.gateway.reaper import Reaper
from services.gateway.requests import Requests
from services.gateway.routes import Routes
from services.gateway.sides import Sides
from services.gateway.stats import StatsRoute
from services.openai.request_names import RequestNames
from services.openai.token_names import TokenNames
from services.settings import Settings
from services.text.model import TextModel

END_TIMEOUT_S = 2.0
CLOSE_TIMEOUT_S = 2.0  # for answers of ended requests to reach their clients
BACKLOG = 2048


class Gateway:
    """`texts` maps every name that clients may use for a model to its text side. The caller owns `bus`."""

    def __init__(self, settings: Settings, bus: Bus, process: str, texts: Mapping[str, TextModel]) -> None:
        self._settings = settings
        self._bus = bus
        self._process = process
        self._beats = BeatTable(bus)
        self._catalog = Catalog(texts)
        self.readiness = Readiness(bus, self._beats, self._catalog, has_fallback=settings.upstream.fallback)
        self.exchange = Exchange(bus, process, settings.api.resume_grace_s, self._beats)
        self._watch_answers = WatchAnswers(bus, self.exchange.is_watched)
        requests, api = RequestNames(), settings.api
        names = {slug: TokenNames(text.tokenizer) for slug, text in self._catalog.models.items()}
        self._sides = Sides(settings, self._catalog, self.readiness)
        self._generation = Generation(
            api, self._catalog, self.readiness, self.exchange, requests, bus, names, self._sides
        )
        self.stats = StatsRoute(bus, self._beats, self._catalog, self.readiness, self._generation)
        self._requests = Requests(api, bus, self.exchange, requests, names)
        throttle = Throttle(self._beats, set(self._catalog.models))
        self._keys = Keys(api.keys_file) if api.keys_file else None
        self._setting = Setting(
            bus, "*" if self._keys else settings.bus.tenant, self._sides.find_here, names, throttle, api.strict
        )
        self._publisher = BeatPublisher(bus, self._beat)
        self._service = MicroService(bus, lambda: (self._beat(), self._watch_answers.tally))
        self._stopped = False
        self._runner: GatewayRunner | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.url = ""

    async def start(self) -> None:
        """Opens the port; `url` says which. Raises `SetupError` if it is taken."""
        api = self._settings.api
        context = tls_context(api)
        self._sides.start()
        await self._beats.start()
        await self._watch_answers.start()
        await self._service.start()
        await self._publisher.start()
        self._tasks.append(asyncio.create_task(Reaper(self.exchange, self.readiness).run(), name="reaper"))
        keeper = BatchKeeper(self._setting, self._beats, self._process)
        self._tasks.append(asyncio.create_task(keeper.run(), name="batches"))
        self._tasks.append(asyncio.create_task(Sweeper(self._bus, self._setting.tenant).run(), name="sweeper"))
        self._tasks.append(asyncio.create_task(self.stats.meters.run(), name="meters"))
        listing = Listing(self._catalog, self._sides.aliases, self._beats)
        routes = Routes(self._process, self._catalog, listing, self.readiness, self._generation)
        files, batches = Files(self._bus, api), Batches(self._bus)
        identify = identified(self._keys, self._settings.bus.tenant)
        self._runner = GatewayRunner(
            routes.application(self._requests, files, batches, self.stats, identify),
            shutdown_timeout=CLOSE_TIMEOUT_S,
            read_timeout_s=api.read_timeout_s,
        )
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, api.host, api.port, backlog=BACKLOG, ssl_context=context).start()
        except OSError as error:
            raise SetupError(
                f"cannot listen on {api.host}:{api.port} (api.host, api.port): {error.strerror or error}",
                param="api.port",
            ) from error
        port = self._runner.addresses[0][1]
        self.url = f"{'https' if context else 'http'}://{f'[{api.host}]' if ':' in api.host else api.host}:{port}"

    async def drain(self, grace_s: float) -> None:
        """Takes no new requests and waits up to `grace_s` for those that are open; the port still answers /ready."""
        self.readiness.draining = True
        await self._publisher.beat()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._generation.idle.wait(), grace_s)

    async def close(self) -> None:
        """Ends what is still open, answers it, closes the port and says that we are gone. Safe after a failed start."""
        await self.exchange.close(END_TIMEOUT_S)
        if self._runner is not None:
            await self._runner.cleanup()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._sides.close()
        self._stopped = True
        await self._publisher.close()
        await self._service.close()
        await self._watch_answers.close()
        await self._beats.close()

    def _beat(self) -> Beat:
        report = self.readiness.report()
        state: ProcessState = "stopped" if self._stopped else "draining" if self.readiness.draining else "ok"
        return Beat(
            process=self._process,
            role="gateway",
            state=state,
            reasons=report.reasons,
            running=self._generation.num_open,
            host=socket.gethostname(),
            pid=os.getpid(),
        )
