"""The gateway's process: from settings to an exit code."""

import asyncio
import gc
import logging
import resource
import secrets
import signal
from collections.abc import Callable
from pathlib import Path

from services import telemetry
from services.bus.connection import Bus
from services.bus.streams import set_up
from services.gateway.exposure import refuse_open_door
from services.gateway.gateway import Gateway
from services.models.registry import resolve
from services.settings import Settings
from services.text.model import TextModel, load_text

_log = logging.getLogger("kvrelay.gateway")


def run(settings: Settings, bus_url: str) -> int:
    """Runs until SIGTERM or SIGINT. Returns the exit code."""
    process = new_process_name()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # 1,024 by default, and each client's connection is one
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        telemetry.configure("gateway", process, settings)
        asyncio.run(serve(settings, bus_url, process=process))
    finally:
        telemetry.shutdown()
    return 0


async def serve(
    settings: Settings, bus_url: str, ready: Callable[[str], None] = lambda url: None, *, process: str | None = None
) -> None:
    """Serves until SIGTERM or SIGINT; then takes no new requests, finishes the open ones within the grace, returns.

    `ready` gets the URL once the port is open. `process` must be unique to this life of the process; None makes one
    up. Raises `SetupError`.
    """
    refuse_open_door(settings.api)
    process = process or new_process_name()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    texts = await asyncio.to_thread(load_texts, settings)
    async with await Bus.connect(bus_url, process, settings.bus) as bus:
        for slug in {text.slug for text in texts.values()}:
            await set_up(bus, slug)
        gateway = Gateway(settings, bus, process, texts)
        try:
            await gateway.start()
            # What is there now stays. The collector would look at all of it again and again, while every stream waits
            # (20 to 40 ms each time).
            gc.collect()
            gc.freeze()
            _log.info("listening", extra={"fields": {"url": gateway.url}})
            ready(gateway.url)
            await stop.wait()
            _log.info("draining", extra={"fields": {"grace_s": settings.scheduler.grace_s}})
            await gateway.drain(settings.scheduler.grace_s)
        finally:
            await gateway.close()


def new_process_name() -> str:
    return f"gateway-{secrets.token_hex(4)}"


def load_texts(settings: Settings) -> dict[str, TextModel]:
    """The served model's text side under its slug, its own name, and the name in the settings."""
    files = resolve(settings.compute.model, Path(settings.kv.data_dir))
    text = load_text(files)
    return dict.fromkeys((files.slug, files.name, settings.compute.model), text)
