"""Which programs make up a pipeline, with which settings and on which cores."""

import sys
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from schemas.errors import SetupError
from services.config import KEYS, Settings, to_env, value_of
from services.settings import parse_cores
from services.supervisor import cores
from services.supervisor.child import Program
from services.tuned import usable_cores

METRICS_PORT = KEYS["api.metrics_port"]
_KVRELAY = [sys.executable, "-P", "-m", "services.cli.main"]


def model_program(settings: Settings) -> Program:
    """Gets and converts the model, once, before several workers would do it at the same time."""
    return Program("model", [*_KVRELAY, "model", "fetch", settings.compute.model], to_env(settings))


class Crew(NamedTuple):
    """How many workers of each kind."""

    prefill: int
    decode: int
    both: int = 0

    def names(self) -> list[tuple[str, int]]:
        """(role, number) of each."""
        counts = self._asdict()
        return [(role, number) for role in counts for number in range(counts[role])]


def pipeline_programs(settings: Settings, crew: Crew, *, rolling: bool = False) -> list[Program]:
    """The workers and the gateway. `settings` has the bus URL and the HTTP port that are really used."""
    workers = worker_programs(settings, crew, rolling=rolling)
    return [*workers, _program("gateway", ["gateway"], settings)]


def worker_programs(
    settings: Settings, crew: Crew, *, rolling: bool = False, beside: Sequence[Program] = ()
) -> list[Program]:
    """The workers; `beside` are those that they run beside until these go. `rolling`: they may be of another build."""
    num_workers = sum(crew)
    shares = cores.share(parse_cores(settings.compute.cores) or usable_cores(), num_workers)
    taken = {program.env[METRICS_PORT.env] for program in beside}
    programs = []
    for index, ((role, number), share) in enumerate(zip(crew.names(), shares, strict=True)):
        port = settings.api.metrics_port
        if port > 0:  # the gateway has this one; a worker that replaces one has another port than that
            ports = port + 1 + index, port + 1 + index + num_workers
            port = ports[str(ports[0]) in taken]
        neighbours = settings.compute.neighbours or cores.all_but(share, shares) or "none"
        own = _changed(_changed(settings, "api", metrics_port=port), "compute", cores=share, neighbours=neighbours)
        programs.append(_program(f"{role}-{number}", ["worker", "--role", role, *["--rolling"] * rolling], own))
    return programs


def reloaded(old: Settings, new: Settings) -> Settings:
    """`new`, if workers that run on it may replace those of `old`. Raises `SetupError` naming what may not change."""
    fixed = ("api.", "bus.", "kv.data_dir", "kv.redis_max_bytes", "compute.model")
    changed = [
        name for name in KEYS if name.startswith(fixed) and value_of(old, name) != value_of(new, name)
    ]  # fmt: skip
    if "embedded" in (old.kv.redis_url, new.kv.redis_url) and old.kv.redis_url != new.kv.redis_url:
        changed.append("kv.redis_url")
    if changed:
        raise SetupError(
            f"{', '.join(changed)} changed, which concerns more than the workers: stop `kvrelay up` and start it again"
        )
    return new


def crowded(settings: Settings, num_workers: int) -> bool:
    """True if workers have to share cores."""
    return len(parse_cores(settings.compute.cores) or usable_cores()) < num_workers


def with_addresses(settings: Settings, bus_url: str, port: int) -> Settings:
    """`settings` as the children get them; bus.url is no longer "" nor api.port 0."""
    return _changed(_changed(settings, "bus", url=bus_url), "api", port=port)


def without_metrics(settings: Settings) -> Settings:
    """For the supervisor itself, which has nothing to measure."""
    return _changed(settings, "api", metrics_port=-1)


def _program(name: str, command: list[str], settings: Settings) -> Program:
    return Program(name, [*_KVRELAY, *command], to_env(settings))


def _changed(settings: Settings, group: Literal["compute", "api", "bus"], **values: Any) -> Settings:
    changed = msgspec.structs.replace(getattr(settings, group), **values)
    return msgspec.structs.replace(settings, **{group: changed})
