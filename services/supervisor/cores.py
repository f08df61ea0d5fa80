"""Which cores belong to which worker. Two thread pools that share cores run 10 to 20 times slower, so none do."""

import os
from collections.abc import Sequence

from schemas.errors import SetupError
from services.settings import parse_cores
from services.tuned import usable_cores


def share(cores: list[int], num_workers: int) -> list[str]:
    """A list of cores for each worker, in the order given: equal parts, the rest to the first ones.

    With fewer cores than workers, workers double up, which is slow and said so by the supervisor.
    """
    if len(cores) < num_workers:
        return [str(cores[worker % len(cores)]) for worker in range(num_workers)]
    each, rest = divmod(len(cores), num_workers)
    shares, start = [], 0
    for worker in range(num_workers):
        end = start + each + (worker < rest)
        shares.append(",".join(map(str, cores[start:end])))
        start = end
    return shares


def all_but(share: str, shares: Sequence[str]) -> str:
    """The cores of the other `shares`."""
    return ",".join(
        map(str, sorted({core for other in shares for core in parse_cores(other)} - set(parse_cores(share))))
    )


def own(text: str) -> None:
    """Binds this process to the cores of `text`, if any. Raises `SetupError` if the machine lacks them."""
    cores = parse_cores(text)
    if not cores or not hasattr(os, "sched_setaffinity"):
        return
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        raise SetupError(
            f"compute.cores = {text!r}: this process may use {usable_cores()}, not {cores}", param="compute.cores"
        ) from error
