"""`kvrelay batch run`: a batch of a local file in this process, on whatever workers there are."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import click

from schemas.errors import InvalidRequest, KvrelayError, SetupError
from services.batch.lines import Plan, make_plan
from services.batch.results import FAILED, Result
from services.batch.run import BatchRun, Setting
from services.batch.shelf import batch_id_of
from services.batch.throttle import Throttle
from services.bus.beats import BeatTable
from services.bus.connection import Bus
from services.bus.streams import set_up
from services.cli.batch_output import place_of, rewrite, writing
from services.cli.borrowed_pipeline import pipeline
from services.cli.durations import shown
from services.cli.progress import Progress
from services.config import Settings
from services.gateway.catalog import Catalog
from services.gateway.main import load_texts
from services.openai.token_names import TokenNames

FIRST_RATE_S = 2.0  # before that a rate says nothing


def run_file(settings: Settings, file: Path, output: Path, endpoint: str, *, round_number: int) -> int:
    """How many lines failed. Raises `InvalidRequest` for a file of which nothing can run, and `SetupError`."""
    output = place_of(output)
    if output.exists() and output.samefile(file):
        raise SetupError("the output file is the input file: name another one with -o")
    with file.open("rb") as opened:
        plan = make_plan(opened, endpoint)
        if plan.errors:
            raise InvalidRequest("; ".join(error.message for error in plan.errors[:5]))
        with _nats(settings) as url:
            try:
                return asyncio.run(_run(settings, url, opened, plan, output, endpoint, round_number=round_number))
            except asyncio.CancelledError:
                done = f", {output} has what is done" if output.exists() else ""
                click.echo(f"stopped: the same command goes on{done}", err=True)
                raise click.Abort from None
            except ExceptionGroup as group:  # of the tasks that run lines
                raise _first(group) from group


def _first(error: Exception) -> Exception:
    """One of ours, if there is one: it says what happened."""
    while isinstance(error, ExceptionGroup):
        error = (error.subgroup(KvrelayError) or error).exceptions[0]
    return error


@contextlib.contextmanager
def _nats(settings: Settings) -> Iterator[str]:
    """Of the setting, or of the pipeline of the data folder, which is started if it does not run."""
    if settings.bus.url:
        yield settings.bus.url
        return
    with pipeline(settings) as (_, url):
        yield url


async def _run(
    settings: Settings, url: str, file: BinaryIO, plan: Plan, output: Path, endpoint: str, *, round_number: int
) -> int:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    texts = await asyncio.to_thread(load_texts, settings)
    catalog = Catalog(texts)
    names = {slug: TokenNames(text.tokenizer) for slug, text in catalog.models.items()}
    tenant = settings.bus.tenant
    async with await Bus.connect(url, "kvrelay-cli", settings.bus) as bus:
        for slug in catalog.models:
            await set_up(bus, slug, adjusts=False)
        beats = BeatTable(bus)
        await beats.start()
        try:
            setting = Setting(bus, tenant, catalog.find, names, Throttle(beats, set(catalog.models)))
            name = await asyncio.to_thread(batch_id_of, file, endpoint, str(round_number), *catalog.models)
            done = await rewrite(bus, tenant, name, output)
            with output.open("ab", buffering=0) as out, _Meter(plan.total, done) as meter:

                def on_result(result: Result) -> None:
                    with writing(output):
                        out.write(result.data + b"\n")
                    meter.note(result)

                await BatchRun(setting, name, endpoint, file, on_result).run(plan, {result.line for result in done})
            found = await rewrite(bus, tenant, name, output)
        finally:
            await beats.close()
    failed = sum(result.outcome == FAILED for result in found)
    click.echo(f"{len(found)} of {plan.total} lines in {output}, {failed} failed", err=True)
    return failed


class _Meter:
    """The line on the terminal: how many, how fast, how long still."""

    def __init__(self, total: int, done: list[Result]) -> None:
        self._total = total
        self._before = self._done = len(done)
        self._failed = sum(result.outcome == FAILED for result in done)
        self._started_s = time.monotonic()
        self._progress = Progress("lines")

    def __enter__(self) -> "_Meter":
        if self._before:
            click.echo(f"going on: {self._before} of {self._total} lines were done before", err=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.clear()

    def note(self, result: Result) -> None:
        self._done += 1
        self._failed += result.outcome == FAILED
        self._progress.say(self.line(time.monotonic() - self._started_s))

    def line(self, passed_s: float) -> str:
        told = f"{self._done} of {self._total} lines"
        told += f", {self._failed} failed" if self._failed else ""
        if passed_s < FIRST_RATE_S:
            return told
        rate = (self._done - self._before) / passed_s
        return f"{told}, {rate:.1f} a second, {shown((self._total - self._done) / rate)} left"
