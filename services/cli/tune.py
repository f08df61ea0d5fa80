"""`kvrelay tune`: measures the scheduler's settings on this machine, and keeps the best as defaults."""

import json

import click

from schemas.errors import SetupError
from services import tuned
from services.cli.options import with_settings
from services.config import Settings
from services.supervisor import cores
from services.tuned import usable_cores

_EPILOG = """\b
Examples:
  kvrelay tune                       a minute or two; `kvrelay restart` afterwards
  kvrelay tune --dry-run --json
  kvrelay tune --workers 1           for `kvrelay up --both 1`, which has all cores
  kvrelay tune --show
"""


@click.command(epilog=_EPILOG)
@with_settings("compute.model", "compute.dtype", "compute.threads", "kv.data_dir")
@click.option("--workers", type=click.IntRange(1), default=2, show_default=True, help="Workers that share the cores.")
@click.option("--rounds", type=click.IntRange(1), default=2, show_default=True, help="Rounds; medians count.")
@click.option(
    "--max-pass-ms", type=click.FloatRange(0), default=400.0, show_default=True, help="Longest gap of prompts."
)
@click.option(
    "--max-gap-ms", type=click.FloatRange(0), default=100.0, show_default=True, help="Longest gap of answers."
)
@click.option("--dry-run", is_flag=True, help="Keep nothing.")
@click.option("--show", is_flag=True, help="Only print what is kept.")
@click.option("--reset", is_flag=True, help="Only forget what is kept.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def tune(
    settings: Settings,
    workers: int,
    rounds: int,
    max_pass_ms: float,
    max_gap_ms: float,
    dry_run: bool,
    show: bool,
    reset: bool,
    as_json: bool,
) -> None:
    """Choose chunk_tokens, token_budget and max_sequences for this model and machine.

    Prints tokens a second, the p99 gap and its jitter (p99 less the median) for each candidate. A gap is what an answer
    waits for its next token, and a prompt for its turn. Chosen is, of those within the longest gap and within 3 % of
    the best rate among them, the one with the shortest gap. The choice is kept in <data folder>/tuned.json and stands
    in for defaults: kvrelay.toml, the environment and --set go before it.
    """
    if dry_run + show + reset > 1:
        raise click.UsageError("--dry-run, --show and --reset exclude each other")
    if reset:
        there = tuned.reset(settings.kv.data_dir)
        click.echo("forgotten" if there else "there was nothing", err=True)
        return
    if show:
        _show(settings, as_json)
        return
    mine = cores.share(usable_cores(), workers)[0]
    here = tuned.machine()  # before this process has fewer cores
    cores.own(mine)
    from services.bench.tune import choose, load, sweep

    threads = settings.compute.threads or len(usable_cores())
    measured = list(sweep(load(settings, threads), settings.kv.block_tokens, rounds, _tell))
    for row in measured:
        _print(row.row(), as_json)
    chosen = [
        choose((row for row in measured if row.candidate.is_of_prompts is of_prompts), limit)
        for of_prompts, limit in ((True, max_pass_ms), (False, max_gap_ms))
    ]
    values = {name: value for row in chosen for name, value in row.candidate.values().items()}
    _print({"chosen": True, **values}, as_json)
    if not dry_run:
        click.echo(f"kept in {tuned.keep(settings, values, here)}", err=True)


def _show(settings: Settings, as_json: bool) -> None:
    kept = tuned.choice_for(settings)
    if kept is None:
        raise SetupError(f"nothing is kept in {tuned.path_of(settings.kv.data_dir)} for this model and machine")
    _print(kept.values, as_json)


def _tell(words: str) -> None:
    click.echo(words, err=True)


def _print(row: dict[str, float] | dict[str, int], as_json: bool) -> None:
    click.echo(json.dumps(row) if as_json else "  ".join(f"{name} {value}" for name, value in row.items()))
