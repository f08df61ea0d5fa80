"""The output file of a batch, which always holds whole lines of what is on the results stream."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from schemas.errors import SetupError
from services.batch.results import Result, stored
from services.bus.connection import Bus


def place_of(output: Path) -> Path:
    """Where the file will lie. Raises `SetupError` where none can: told before hours of work, not behind them."""
    place = output.resolve()  # what a link points at, since `rewrite` would replace the link
    if place.exists() and not place.is_file():
        raise SetupError(f"{output} is no file that can be replaced: name another one with -o")
    if not place.parent.is_dir():
        raise SetupError(f"there is no folder {place.parent}: make it, or name another file with -o")
    if not os.access(place.parent, os.W_OK | os.X_OK):
        raise SetupError(f"{place.parent} cannot be written to: name another file with -o")
    return place


@contextlib.contextmanager
def writing(output: Path) -> Iterator[None]:
    """What the disk says against it, in words: no answer is lost by that."""
    try:
        yield
    except OSError as error:
        why = f"{output} cannot be written: {error.strerror}"
        raise SetupError(f"{why}; the answers are kept, and the same command goes on") from error


async def rewrite(bus: Bus, tenant: str, batch: str, output: Path) -> list[Result]:
    """Puts all results so far there, in place of whatever was, in one step; they come back without their data."""
    beside, found = output.with_name(output.name + ".tmp"), []
    with writing(output):
        with beside.open("wb") as file:
            async for result in stored(bus, tenant, batch):
                file.write(result.data + b"\n")
                found.append(result._replace(data=b""))
            file.flush()
            os.fsync(file.fileno())
        beside.replace(output)
    return found
