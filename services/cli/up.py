"""`kvrelay up`: the whole pipeline on this machine."""

import sys

import click

from services.cli.options import reloader, rolling_option, with_settings
from services.config import Settings


@click.command()
@with_settings(
    "api.port",
    "api.host",
    "api.keys_file",
    "api.insecure",
    "kv.data_dir",
    "kv.redis_url",
    "compute.model",
    "compute.dtype",
    "compute.threads",
    "bus.url",
)
@click.option("--prefill", type=click.IntRange(0, 64), metavar="N", help="Prefill workers  [1, with --both 0].")
@click.option("--decode", type=click.IntRange(0, 64), metavar="N", help="Decode workers  [1, with --both 0].")
@click.option(
    "--both", type=click.IntRange(0, 64), default=0, metavar="N", help="Workers that do both, for small sites  [0]."
)
@rolling_option
def up(settings: Settings, prefill: int | None, decode: int | None, both: int, rolling: bool) -> None:
    """Run NATS, prefill and decode workers and the HTTP gateway until Ctrl-C.

    Prints one line on stdout once requests are answered: ready <http url> <nats url>. Logs go to stderr. What dies is
    started again, also a worker that was drained; what keeps dying ends everything with an error. With --redis embedded
    (or a URL) workers share KV blocks through a Valkey as well as through the disk. `kvrelay restart` (or SIGHUP) reads
    the configuration again and replaces the workers without losing or repeating a token. `--both 1` runs one worker for
    both stages instead of two: it takes less memory, and long prompts hold up the answers beside them.
    """
    from services.gateway.exposure import refuse_open_door
    from services.supervisor.plan import Crew
    from services.supervisor.supervisor import Asked, run

    others = 0 if both else 1
    crew = Crew(others if prefill is None else prefill, others if decode is None else decode, both)
    if not (crew.both or (crew.prefill and crew.decode)):
        raise click.UsageError("a pipeline needs a prefill and a decode worker, or one that does both")
    refuse_open_door(settings.api)
    sys.exit(run(Asked(settings, crew, reloader(), rolling)))
