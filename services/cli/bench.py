"""`kvrelay bench`: measures, and prints JSON lines to compare with."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import msgspec

from schemas.job import Sampling
from services.cli import bench_decode, bench_load
from services.cli.bench_options import by_peer, sizes_of
from services.cli.options import with_settings
from services.config import Settings, to_env
from services.settings import parse_cores
from services.supervisor import cores
from services.supervisor.valkey import ValkeyServer
from services.tuned import usable_cores

# services.bench.store.SECTIONS, without importing it
STORE_SECTIONS = ["eviction", "dedupe", "lookup", "tiers", "codecs", "merges"]
# services.bench.peer.PEERS, likewise
PEERS = ["llamacpp", "vllm", "hf"]

_ENGINE_EPILOG = """\b
Examples:
  kvrelay bench engine --peer llamacpp --peer vllm --rounds 5
  kvrelay bench engine --peer llamacpp --peer-python /opt/llama/bin/python --threads 1 --batch 1
  kvrelay bench engine --temperature 1 --top-p 0.9 --roofline
"""

_STORE_EPILOG = """\b
Examples:
  kvrelay bench store                                    all sections; a made-up trace
  kvrelay bench store eviction --trace FILE --blocks 5000
  kvrelay bench store lookup --stored 10000,100000 --json
  kvrelay bench store tiers --redis URL                  beside NVMe your Redis, not an embedded Valkey
"""


@click.group()
def bench() -> None:
    """Measure this machine."""


@bench.command(epilog=_ENGINE_EPILOG)
@with_settings("compute.model", "compute.dtype", "compute.threads", "kv.data_dir")
@click.option("--batch", "batches", default="1,4,8,16", show_default=True, help="Batch sizes, comma-separated.")
@click.option("--ctx", type=click.IntRange(16), default=512, show_default=True, help="Prompt tokens a sequence.")
@click.option("--steps", type=click.IntRange(1), default=64, show_default=True, help="Decode steps a round.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Rounds; medians are printed.")
@click.option("--peer", "peers", type=click.Choice(PEERS), multiple=True, help="Another engine, in turns with ours.")
@click.option("--peer-python", "pythons", multiple=True, metavar="[PEER=]PATH", help="Its Python  [.peers/<peer>/...].")
@click.option("--peer-model", "models", multiple=True, metavar="[PEER=]PATH", help="The same weights in its form.")
@click.option("--temperature", type=click.FloatRange(0.0), default=0.0, show_default=True, help="Of our sampling.")
@click.option("--top-p", type=click.FloatRange(0.0, 1.0), default=1.0, show_default=True, help="Of our sampling.")
@click.option("--roofline", is_flag=True, help="Also what part of the memory's read rate a step reaches.")
def engine(
    settings: Settings,
    batches: str,
    ctx: int,
    steps: int,
    rounds: int,
    peers: tuple[str, ...],
    pythons: tuple[str, ...],
    models: tuple[str, ...],
    temperature: float,
    top_p: float,
    roofline: bool,
) -> None:
    """The bare engine, without queue and store: prefill and decode tokens/s, one JSON line a batch size.

    With --peer, another engine computes the same in turns with ours, on the same cores with as many threads, in a
    process of its own that sleeps meanwhile; the ratios are ours over theirs.
    """
    sizes = sizes_of(batches, "--batch")
    cores.own(settings.compute.cores)
    usable = usable_cores()
    threads = settings.compute.threads or len(usable)
    cores.own(",".join(map(str, usable[:threads])))
    from services.bench.engine import Asked, run

    of_python, of_model = by_peer(pythons, peers, "--peer-python"), by_peer(models, peers, "--peer-model")
    places = [(name, of_python.get(name, ""), of_model.get(name, "")) for name in peers]
    asked = Asked(
        batches=sizes,
        ctx_tokens=ctx,
        num_steps=steps,
        threads=threads,
        cores=usable[:threads],
        rounds=rounds,
        sampling=Sampling(temperature=temperature, top_p=top_p),
        has_roofline=roofline,
        places=places,
        env=to_env(settings),
    )
    for line in run(settings, asked):
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

        decode_cores = parse_cores(cores.share(usable_cores(), 2)[1])
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
    depths = sizes_of(queued, "--queued")
    from services.bench.queue import run

    for line in run(settings, depths, jobs, rounds):
        click.echo(json.dumps(line))


@bench.command(epilog=_STORE_EPILOG)
@with_settings("compute.model", "compute.dtype", "kv.data_dir", "kv.redis_url")
@click.argument("sections", nargs=-1, type=click.Choice(STORE_SECTIONS))
@click.option("--trace", type=click.Path(path_type=Path), help="JSON lines with timestamp and hash_ids.")
@click.option("--blocks", default="1000,5000,20000", show_default=True, help="Store sizes for eviction, in blocks.")
@click.option("--stored", default="10000,100000,1000000", show_default=True, help="Stored blocks for lookup.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def store(
    settings: Settings, sections: tuple[str, ...], trace: Path | None, blocks: str, stored: str, as_json: bool
) -> None:
    """The KV store: eviction against LRU and the optimum on a trace, deduplication, look-ups, put and get of each tier
    beside its raw limit, codecs and quantisations on real KV, merges of resident blocks.

    Limits stand beside what was measured, as min_... and max_...; without SECTIONS, all of them run.
    """
    sizes, counts = sizes_of(blocks, "--blocks"), sizes_of(stored, "--stored")
    from services.bench.store import Asked, run

    with _some_redis(settings, sections) as redis_url:
        for row in run(Asked(settings, trace, sizes, counts, redis_url), sections):
            click.echo(json.dumps(row) if as_json else "  ".join(f"{name} {value}" for name, value in row.items()))


@contextmanager
def _some_redis(settings: Settings, sections: tuple[str, ...]) -> Iterator[str]:
    """The URL of the user's own, or of a Valkey for the time being; "" if no section wants one."""
    if sections and "tiers" not in sections:
        yield ""
    elif settings.kv.redis_url not in ("", "embedded"):
        yield settings.kv.redis_url
    else:
        with tempfile.TemporaryDirectory(prefix="kvrelay-bench-") as folder:
            server = ValkeyServer(msgspec.structs.replace(settings.kv, data_dir=folder))
            server.start()
            try:
                yield server.url
            finally:
                server.stop()


for _command in (
    bench_decode.shared_prefix,
    bench_decode.speculation,
    bench_decode.grammar,
    bench_decode.kv_forms,
    bench_decode.quality,
    bench_load.gap,
    bench_load.warm,
    bench_load.memory,
    bench_load.batch,
    bench_load.gateway,
):
    bench.add_command(_command)
