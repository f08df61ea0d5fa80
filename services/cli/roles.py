"""One process of the pipeline each: a worker, the gateway."""

import sys
from importlib import import_module
from typing import NoReturn, Protocol

import click

from schemas.errors import SetupError
from services.cli.options import rolling_option, with_settings
from services.config import Settings
from services.supervisor import cores

_MAINS = {"prefill": "services.prefill.main", "decode": "services.decode.main", "both": "services.both.main"}
_WORKER = ("bus.url", "kv.data_dir", "kv.redis_url", "compute.model", "compute.dtype", "compute.threads")


class Main(Protocol):
    def __call__(self, settings: Settings, bus_url: str, *, rolling: bool) -> int: ...


def _bus_url(settings: Settings) -> str:
    if not settings.bus.url:
        raise SetupError(
            "bus.url is empty: say which NATS to work for with --nats URL, or use `kvrelay up`, which runs one",
            param="bus.url",
        )
    return settings.bus.url


@click.command()
@with_settings(*_WORKER)
@rolling_option
@click.option("--role", type=click.Choice(list(_MAINS)), required=True)
def worker(settings: Settings, rolling: bool, role: str) -> None:
    """Run one worker: `prefill`, `decode`, or `both` stages on one engine.

    One that does both takes the least memory and needs no other; long prompts hold up the answers beside them.
    """
    _run(role, settings, rolling)


@click.command()
@with_settings(*_WORKER)
@rolling_option
def prefill(settings: Settings, rolling: bool) -> None:
    """Run one prefill worker: prompts to KV blocks and first tokens."""
    _run("prefill", settings, rolling)


@click.command()
@with_settings(*_WORKER)
@rolling_option
def decode(settings: Settings, rolling: bool) -> None:
    """Run one decode worker: stored blocks to streams of tokens."""
    _run("decode", settings, rolling)


def _run(role: str, settings: Settings, rolling: bool) -> NoReturn:
    url = _bus_url(settings)
    cores.own(settings.compute.cores)  # before torch makes its thread pool
    main: Main = import_module(_MAINS[role]).run
    sys.exit(main(settings, url, rolling=rolling))


@click.command()
@with_settings(
    "bus.url", "api.host", "api.port", "api.keys_file", "api.insecure", "kv.data_dir", "compute.model", "bus.tenant"
)
def gateway(settings: Settings) -> None:
    """Run the OpenAI-compatible HTTP gateway."""
    url = _bus_url(settings)
    from services.gateway.main import run

    sys.exit(run(settings, url))
