"""`kvrelay bench`: measures, and prints JSON lines to compare with."""

import json

import click

from schemas.errors import SetupError
from services.cli.options import with_settings
from services.config import Settings
from services.supervisor import cores


@click.group()
def bench() -> None:
    """Measure this machine."""


@bench.command()
@with_settings("compute.model", "compute.dtype", "compute.threads", "kv.data_dir")
@click.option("--batch", "batches", default="1,4,8,16", show_default=True, help="Batch sizes, comma-separated.")
@click.option("--ctx", type=click.IntRange(16), default=512, show_default=True, help="Prompt tokens a sequence.")
@click.option("--steps", type=click.IntRange(1), default=64, show_default=True, help="Decode steps measured.")
def engine(settings: Settings, batches: str, ctx: int, steps: int) -> None:
    """The bare engine, without queue and store: prefill and decode tokens/s, one JSON line a batch size."""
    sizes = _sizes(batches, "--batch")
    cores.own(settings.compute.cores)
    from services.bench.engine import run

    threads = settings.compute.threads or len(cores.usable())
    for line in run(settings, sizes, ctx, threads, steps):
        click.echo(json.dumps(line))


@bench.command()
@with_settings("compute.model", "compute.dtype", "compute.threads", "kv.data_dir", "bus.url")
@click.option("--prompt", type=click.IntRange(1), default=64, show_default=True, help="Prompt tokens.")
@click.option("--tokens", type=click.IntRange(8), default=128, show_default=True, help="Tokens of an answer.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Rounds measured.")
def pipeline(settings: Settings, prompt: int, tokens: int, rounds: int) -> None:
    """One stream through a pipeline beside the bare engine: what queue, store and streaming cost."""
    from services.cli import borrowed_pipeline

    with borrowed_pipeline.pipeline(settings) as (_, nats_url):
        from services.bench.pipeline import run

        decode_cores = cores.parse(cores.share(cores.usable(), 2)[1])
        threads = settings.compute.threads or len(decode_cores)
        for line in run(settings, nats_url, decode_cores, threads, prompt, tokens, rounds):
            click.echo(json.dumps(line))


@bench.command()
@with_settings("compute.model", "compute.dtype", "kv.data_dir", "bus.url")
@click.option("--prompt", type=click.IntRange(32), default=2000, show_default=True, help="Tokens of the conversation.")
@click.option("--turn", type=click.IntRange(1), default=40, show_default=True, help="Tokens of its last turn.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Rounds measured.")
def edit(settings: Settings, prompt: int, turn: int, rounds: int) -> None:
    """The first token of a conversation whose last turn was edited, beside a cold run of the same prompt."""
    if turn >= prompt:
        raise click.UsageError("--turn must be a part of --prompt")
    from services.cli import borrowed_pipeline

    with borrowed_pipeline.pipeline(settings) as (_, nats_url):
        from services.bench.edit import run

        for line in run(settings, nats_url, prompt, turn, rounds):
            click.echo(json.dumps(line))


@bench.command()
@with_settings()
@click.option("--queued", default="100,100000,500000", show_default=True, help="Depths; the first is compared with.")
@click.option("--jobs", type=click.IntRange(1), default=500, show_default=True, help="Jobs a round.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Rounds measured.")
def queue(settings: Settings, queued: str, jobs: int, rounds: int) -> None:
    """Publishing and pulling behind so many waiting jobs, beside a queue with few, on brokers of its own."""
    depths = _sizes(queued, "--queued")
    from services.bench.queue import run

    for line in run(settings, depths, jobs, rounds):
        click.echo(json.dumps(line))


def _sizes(text: str, option: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise SetupError(f"{option} {text!r} is not a list of sizes like 1,4,8")
    return sizes
