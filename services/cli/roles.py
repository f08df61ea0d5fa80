"""One process of the pipeline each: a prefill worker, a decode worker, the gateway."""

import sys

import click

from schemas.errors import SetupError
from services.cli.options import rolling_option, with_settings
from services.config import Settings
from services.supervisor import cores

_WORKER = ("bus.url", "kv.data_dir", "kv.redis_url", "compute.model", "compute.dtype", "compute.threads")


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
def prefill(settings: Settings, rolling: bool) -> None:
    """Run one prefill worker: prompts to KV blocks and first tokens."""
    url = _bus_url(settings)
    cores.own(settings.compute.cores)  # before torch makes its thread pool
    from services.prefill.main import run

    sys.exit(run(settings, url, rolling=rolling))


@click.command()
@with_settings(*_WORKER)
@rolling_option
def decode(settings: Settings, rolling: bool) -> None:
    """Run one decode worker: stored blocks to streams of tokens."""
    url = _bus_url(settings)
    cores.own(settings.compute.cores)
    from services.decode.main import run

    sys.exit(run(settings, url, rolling=rolling))


@click.command()
@with_settings("bus.url", "api.host", "api.port", "kv.data_dir", "compute.model", "bus.tenant")
def gateway(settings: Settings) -> None:
    """Run the OpenAI-compatible HTTP gateway."""
    url = _bus_url(settings)
    from services.gateway.main import run

    sys.exit(run(settings, url))
