"""`kvrelay bench` of decoding: `shared-prefix`, `speculation`, `grammar`, `kv-forms`, and `quality`: how true it is."""

import contextlib
import json

import click

from services.cli.bench_options import by_peer, sizes_of
from services.cli.options import with_settings
from services.config import Settings, to_env
from services.supervisor import cores
from services.tuned import usable_cores

_MODEL = ("compute.model", "compute.dtype", "compute.threads", "kv.data_dir")


def _threads(settings: Settings) -> int:
    cores.own(settings.compute.cores)
    return settings.compute.threads or len(usable_cores())


@click.command("shared-prefix")
@with_settings(*_MODEL)
@click.option("--sequences", type=click.IntRange(2), default=16, show_default=True)
@click.option("--prefix", type=click.IntRange(64), default=2048, show_default=True, help="Tokens that all share.")
@click.option("--steps", type=click.IntRange(1), default=32, show_default=True, help="Decode steps a round.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Rounds measured.")
def shared_prefix(settings: Settings, sequences: int, prefix: int, steps: int, rounds: int) -> None:
    """Decode steps of sequences that share a prefix: held once, and as a copy for each."""
    threads = _threads(settings)
    from services.bench import decode

    for row in decode.shared_prefix(settings, threads, sequences, prefix, steps, rounds):
        click.echo(json.dumps(row))


@click.command()
@with_settings(*_MODEL)
@click.option("--tokens", type=click.IntRange(2), default=100, show_default=True, help="Of an answer, at most.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Rounds measured.")
def speculation(settings: Settings, tokens: int, rounds: int) -> None:
    """Guessed tokens: ten kept tasks that repeat their prompt and some free text, with and without."""
    threads = _threads(settings)
    from services.bench import speculation

    for row in speculation.run(settings, threads, tokens, rounds):
        click.echo(json.dumps(row))


@click.command()
@with_settings(*_MODEL)
@click.option("--batch", "batches", default="1,4,16", show_default=True, help="Batch sizes, comma-separated.")
@click.option("--steps", type=click.IntRange(2), default=200, show_default=True, help="Tokens of each sequence.")
def grammar(settings: Settings, batches: str, steps: int) -> None:
    """Decode steps of sequences that are held to a JSON schema, and of free ones, in turns."""
    sizes = sizes_of(batches, "--batch")
    threads = _threads(settings)
    from services.bench import grammar

    for row in grammar.run(settings, threads, sizes, steps):
        click.echo(json.dumps(row))


@click.command("kv-forms")
@with_settings(*_MODEL)
@click.option("--batch", "batches", default="1,4", show_default=True, help="Batch sizes, comma-separated.")
@click.option("--ctx", type=click.IntRange(16), default=4096, show_default=True, help="Tokens a sequence.")
@click.option("--steps", type=click.IntRange(1), default=32, show_default=True, help="Decode steps a round.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Rounds measured.")
def kv_forms(settings: Settings, batches: str, ctx: int, steps: int, rounds: int) -> None:
    """Decode steps with K and V as they are, and with kv.quantisation = int8."""
    sizes = sizes_of(batches, "--batch")
    threads = _threads(settings)
    from services.bench import decode

    for row in decode.kv_forms(settings, threads, sizes, ctx, steps, rounds):
        click.echo(json.dumps(row))


@click.command()
@with_settings(*_MODEL)
@click.option("--tokens", type=click.IntRange(16), default=1024, show_default=True, help="Of the fixed text.")
@click.option("--dtypes", default="", help="Arithmetics, comma-separated  [compute.dtype].")
@click.option("--peer", "peers", type=click.Choice(["llamacpp"]), multiple=True, help="Another engine beside ours.")
@click.option("--peer-python", "pythons", multiple=True, metavar="PEER=PATH", help="Its Python  [.peers/<peer>/...].")
@click.option(
    "--peer-model", "models", multiple=True, metavar="PEER=PATH", help="The same weights; hf: the reference's."
)
def quality(
    settings: Settings,
    tokens: int,
    dtypes: str,
    peers: tuple[str, ...],
    pythons: tuple[str, ...],
    models: tuple[str, ...],
) -> None:
    """Perplexity, KL and agreement with transformers in float32 on a fixed text, of the same weights."""
    threads = _threads(settings)
    from services.bench.peer import Peer, Place
    from services.bench.quality import run, text_ids
    from services.models.registry import resolve

    names = ("hf", *peers)
    of_python, of_model = by_peer(pythons, names, "--peer-python"), by_peer(models, names, "--peer-model")
    files = resolve(settings.compute.model, settings.kv.data_dir)
    ids = text_ids(settings, tokens)
    with contextlib.ExitStack() as stack:
        opened = [
            stack.enter_context(
                Peer(
                    Place.of(name, files, of_python.get(name, ""), of_model.get(name, "")),
                    to_env(settings),
                    usable_cores(),
                    threads,
                    (1, len(ids), 1),
                )
            )
            for name in names
        ]
        for row in run(settings, ids, opened[0], opened[1:], dtypes.split(",")):
            click.echo(json.dumps(row))
