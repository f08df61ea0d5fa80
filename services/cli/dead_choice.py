"""Which dead letters a command is about: the options that say so, and finding them."""

import contextlib
import functools
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, cast

import click

from schemas.errors import JobNotFound
from schemas.subjects import check_job_id, check_slug
from services.bus.connection import Bus
from services.bus.dead_letters import ANY, DeadLetter, dead_letters


@dataclass(frozen=True)
class Choice:
    """What is empty leaves nothing out."""

    job: str = ""
    tenant: str = ""
    code: str = ""
    seq: int | None = None
    all: bool = False
    yes: bool = False

    def __str__(self) -> str:
        parts = {"about job": self.job, "of tenant": self.tenant, "with code": self.code, "with number": self.seq}
        return " ".join(f"{name} {value}" for name, value in parts.items() if value)


_OPTIONS: dict[str, Callable[[Any], Any]] = {
    "job": click.argument("job", metavar="[ID]", required=False, default=""),
    "tenant": click.option("--tenant", default="", metavar="NAME", help="Only of this tenant  [default: of any]"),
    "code": click.option("--code", default="", metavar="CODE", help="Only with this error code"),
    "seq": click.option("--seq", type=click.IntRange(1), metavar="N", help="Only the one of this number"),
    "all": click.option("--all", is_flag=True, help="All of them, or all that --tenant and --code leave"),
}


def with_choice(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives the command `choice`. One that takes a job must be told a job, a number, or to take all."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def run(**arguments: Any) -> Any:
            given = {name: arguments.pop(name) for name in [*names, *(["yes"] if "all" in names else [])]}
            choice = Choice(**given)
            if "job" in names:
                _check(choice, can_take_all="all" in names)
            if choice.tenant:
                check_slug(choice.tenant, "tenant")
            return command(choice=choice, **arguments)

        if "all" in names:
            run = click.option("--yes", is_flag=True, help="Do not ask before --all")(run)
        for name in reversed(names):
            run = _OPTIONS[name](run)
        return run

    return decorate


def _check(choice: Choice, *, can_take_all: bool) -> None:
    if choice.job:
        check_job_id(choice.job)
    if choice.all and (choice.job or choice.seq):
        raise click.UsageError("--all takes no ID and no --seq")
    if not (choice.job or choice.seq or choice.all):
        raise click.UsageError("name a job or --seq N" + (", or say --all" if can_take_all else ""))


async def each(bus: Bus, choice: Choice) -> AsyncGenerator[DeadLetter, None]:
    """Oldest first."""
    found = cast(AsyncGenerator[DeadLetter, None], dead_letters(bus, choice.tenant or ANY, choice.job or ANY))
    async with contextlib.aclosing(found):
        async for letter in found:
            if choice.code in ("", letter.code) and choice.seq in (None, letter.sequence):
                yield letter


async def chosen(bus: Bus, choice: Choice) -> list[DeadLetter]:
    """Raises `JobNotFound` if there is none, and `UsageError` for a job id that several tenants have."""
    letters = [letter async for letter in each(bus, choice)]
    if not letters and not choice.all:
        raise JobNotFound(f"there is no dead letter {choice}: `kvrelay dead ls` lists them")
    tenants = sorted({letter.tenant for letter in letters})
    if choice.job and len(tenants) > 1:
        raise click.UsageError(f"several tenants have a job {choice.job}: say --tenant {' or --tenant '.join(tenants)}")
    return letters
