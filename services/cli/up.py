"""`kvrelay up`: the whole pipeline on this machine."""

import sys

import click

from services.cli.options import reloader, rolling_option, with_settings
from services.config import Settings


@click.command()
@with_settings(
    "api.port",
    "api.host",
    "kv.data_dir",
    "kv.redis_url",
    "compute.model",
    "compute.dtype",
    "compute.threads",
    "bus.url",
)
@click.option("--prefill", "num_prefill", type=click.IntRange(1, 64), default=1, show_default=True, metavar="N")
@click.option("--decode", "num_decode", type=click.IntRange(1, 64), default=1, show_default=True, metavar="N")
@rolling_option
def up(settings: Settings, num_prefill: int, num_decode: int, rolling: bool) -> None:
    """Run NATS, prefill and decode workers and the HTTP gateway until Ctrl-C.

    Prints one line on stdout once requests are answered: ready <http url> <nats url>. Logs go to stderr. What dies is
    started again, also a worker that was drained; what keeps dying ends everything with an error. With --redis embedded
    (or a URL) workers share KV blocks through a Valkey as well as through the disk. `kvrelay restart` (or SIGHUP) reads
    the configuration again and replaces the workers without losing or repeating a token.
    """
    from services.supervisor.supervisor import Asked, run

    sys.exit(run(Asked(settings, num_prefill, num_decode, reloader(), rolling)))
