"""`kvrelay bench gap`, `warm`, `memory`, `batch`, `gateway`: a pipeline, or its gateway alone, under a load."""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

from services.cli import borrowed_pipeline
from services.cli.options import with_settings
from services.config import Settings
from services.supervisor.valkey import ValkeyServer

_MODEL = ("compute.model", "compute.dtype", "compute.threads", "kv.data_dir")


@contextlib.contextmanager
def _own_folder(settings: Settings, **kv: str) -> Iterator[Settings]:
    """An empty data folder with the same models, so that nothing of the user's is found or written."""
    with tempfile.TemporaryDirectory(prefix="kvrelay-bench-") as folder:
        models = Path(settings.kv.data_dir).absolute() / "models"
        models.mkdir(parents=True, exist_ok=True)
        (Path(folder) / "models").symlink_to(models)
        yield msgspec.structs.replace(settings, kv=msgspec.structs.replace(settings.kv, data_dir=folder, **kv))


@click.command()
@with_settings(*_MODEL)
@click.option(
    "--prompt", type=click.IntRange(1), default=2000, show_default=True, help="Tokens of the prompts that come."
)
@click.option("--tokens", type=click.IntRange(8), default=256, show_default=True, help="Tokens of the answers beside.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Rounds measured.")
@click.option(
    "--prompts", type=click.IntRange(1), default=10, show_default=True, help="Prompts a round beside a slow decode."
)
def gap(settings: Settings, prompt: int, tokens: int, rounds: int, prompts: int) -> None:
    """Gaps between tokens of 4 answers, with prompts coming all the time and without; the rate of the prompts with each
    step of decode slowed by 10 ms and without; then the gaps in one worker for both."""
    # A step that tries guesses gives several tokens at once, and that is no gap.
    settings = msgspec.structs.replace(settings, scheduler=msgspec.structs.replace(settings.scheduler, speculate="off"))
    for workers in ((), ("--both", "1")):
        with _own_folder(settings) as own, borrowed_pipeline.pipeline(own, *workers) as (_, nats_url):
            from services.bench.gap import run

            named = {"workers": "both in one" if workers else "one of each"}
            for row in run(own, nats_url, prompt, tokens, rounds, **named):
                click.echo(json.dumps(row))
            if not workers:
                from services.bench import slow_decode

                for row in slow_decode.run(own, nats_url, prompt, tokens, prompts, rounds):
                    click.echo(json.dumps(row))


@click.command()
@with_settings(*_MODEL)
@click.option("--prefix", type=click.IntRange(64), default=2048, show_default=True, help="Tokens that are stored.")
@click.option("--new", type=click.IntRange(1), default=32, show_default=True, help="Tokens behind them.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Prefixes measured.")
@click.option("--tier", "tiers", type=click.Choice(["nvme", "valkey"]), multiple=True, help="Only this one.")
def warm(settings: Settings, prefix: int, new: int, rounds: int, tiers: tuple[str, ...]) -> None:
    """The first token behind a stored prefix, beside a cold run, from each tier."""
    from services.bench import warm as bench

    for tier in tiers or ("nvme", "valkey"):
        known = bench.prefixes(settings, rounds, prefix)
        with _stored(settings, known, tier) as reader, borrowed_pipeline.pipeline(reader) as (_, nats_url):
            for row in bench.run(reader, nats_url, known, new, tier):
                click.echo(json.dumps(row))


@contextlib.contextmanager
def _stored(settings: Settings, known: list[list[int]], tier: str) -> Iterator[Settings]:
    """Settings of a pipeline that finds the prefixes in that tier, and nowhere else."""
    from services.bench.warm import store

    with contextlib.ExitStack() as stack:
        url = ""
        if tier == "valkey":
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvrelay-bench-"))
            server = ValkeyServer(msgspec.structs.replace(settings.kv, data_dir=folder))
            server.start()
            stack.callback(server.stop)
            url = server.url
        writer = stack.enter_context(_own_folder(settings, redis_url=url))
        with borrowed_pipeline.pipeline(writer) as (_, nats_url):
            store(writer, nats_url, known)
        yield writer if tier == "nvme" else stack.enter_context(_own_folder(settings, redis_url=url))


@click.command()
@with_settings(*_MODEL)
@click.option("--sequences", type=click.IntRange(1), default=16, show_default=True)
@click.option("--tokens", type=click.IntRange(128), default=2048, show_default=True, help="Tokens of each at its end.")
def memory(settings: Settings, sequences: int, tokens: int) -> None:
    """The most memory that a decode worker holds with so many sequences, beside a bare torch process."""
    with _own_folder(settings) as own, borrowed_pipeline.pipeline(own) as (_, nats_url):
        from services.bench.memory import run

        for row in run(own, nats_url, sequences, tokens):
            click.echo(json.dumps(row))


@click.command()
@with_settings(*_MODEL)
@click.option("--requests", type=click.IntRange(1), default=100, show_default=True, help="Of a round, of each kind.")
@click.option("--rounds", type=click.IntRange(1), default=2, show_default=True, help="Rounds measured.")
@click.option("--prompt", type=click.IntRange(1), default=64, show_default=True, help="Tokens of a request's prompt.")
@click.option("--line", type=click.IntRange(2), default=1000, show_default=True, help="Tokens of a line's prompt.")
@click.option("--tokens", type=click.IntRange(1), default=64, show_default=True, help="Tokens of a line's answer.")
@click.option("--lines", type=click.IntRange(1), default=1000, show_default=True, help="Of the batch, which must last.")
def batch(settings: Settings, requests: int, rounds: int, prompt: int, line: int, tokens: int, lines: int) -> None:
    """The first token of those who ask beside a batch that the gateway runs, and of those who ask without.

    The limit: what it takes on the idle pipeline, a chunk of a line's prompt, a decode step and 10 ms.
    """
    # A step that tries guesses gives several tokens at once, and then it is not known what one takes.
    settings = msgspec.structs.replace(settings, scheduler=msgspec.structs.replace(settings.scheduler, speculate="off"))
    with _own_folder(settings) as own, borrowed_pipeline.pipeline(own) as (http, nats_url):
        from services.bench.batch import Asked, run

        for row in run(own, http, nats_url, Asked(requests, rounds, prompt, line, tokens, lines)):
            click.echo(json.dumps(row))


@click.command()
@with_settings("compute.model", "kv.data_dir")
@click.option("--streams", type=click.IntRange(1, 1000), default=256, show_default=True, help="Answers at once.")
@click.option("--tokens", type=click.IntRange(2), default=100, show_default=True, help="Tokens of each.")
@click.option(
    "--step-ms", type=click.FloatRange(1.0), default=100.0, show_default=True, help="Between two of a stream."
)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Rounds of each kind.")
def gateway(settings: Settings, streams: int, tokens: int, step_ms: float, rounds: int) -> None:
    """The gateway's CPU time for each streamed event, NATS included, beside a plain Starlette server that makes its
    tokens itself; and what one stalled reader in ten costs the others.

    The tokens come from no model, so the gateway is what is measured.
    """
    from services.bench.gateway import Asked, run

    for row in run(settings, Asked(streams, tokens, step_ms / 1000, rounds)):
        click.echo(json.dumps(row))
