"""`kvrelay up`: the whole pipeline on this machine."""

import sys

import click

from services.cli.options import with_settings
from services.config import Settings


@click.command()
@with_settings("api.port", "api.host", "kv.data_dir", "compute.model", "compute.dtype", "compute.threads", "bus.url")
@click.option("--prefill", "num_prefill", type=click.IntRange(1, 64), default=1, show_default=True, metavar="N")
@click.option("--decode", "num_decode", type=click.IntRange(1, 64), default=1, show_default=True, metavar="N")
def up(settings: Settings, num_prefill: int, num_decode: int) -> None:
    """Run NATS, prefill and decode workers and the HTTP gateway until Ctrl-C.

    Prints one line on stdout once requests are answered: ready <http url> <nats url>. Logs go to stderr. What dies is
    started again; what keeps dying ends everything with an error.
    """
    from services.supervisor.supervisor import run

    sys.exit(run(settings, num_prefill, num_decode))
