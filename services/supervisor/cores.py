"""Which cores belong to which worker. Two thread pools that share cores run 10 to 20 times slower, so none do."""

import os

from schemas.errors import SetupError


def parse(text: str) -> list[int]:
    """`"0,2-3"` -> [0, 2, 3]. Raises `SetupError`."""
    cores: list[int] = []
    try:
        for part in filter(None, text.split(",")):
            first, dash, last = part.partition("-")
            cores += range(int(first), int(last if dash else first) + 1)
    except ValueError:
        raise SetupError(f"compute.cores = {text!r} is not a list of cores like 0,2-3", param="compute.cores") from None
    return sorted(set(cores))


def usable() -> list[int]:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


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


def own(text: str) -> None:
    """Binds this process to the cores of `text`, if any. Raises `SetupError` if the machine lacks them."""
    cores = parse(text)
    if not cores or not hasattr(os, "sched_setaffinity"):
        return
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        raise SetupError(
            f"compute.cores = {text!r}: this process may use {usable()}, not {cores}", param="compute.cores"
        ) from error
