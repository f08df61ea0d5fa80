"""Which programs make up a pipeline, with which settings and on which cores."""

import sys
from typing import Any, Literal

import msgspec

from services.config import Settings, to_env
from services.supervisor import cores
from services.supervisor.child import Program

_KVRELAY = [sys.executable, "-P", "-m", "services.cli.main"]


def model_program(settings: Settings) -> Program:
    """Gets and converts the model, once, before several workers would do it at the same time."""
    return Program("model", [*_KVRELAY, "model", "fetch", settings.compute.model], to_env(settings))


def pipeline_programs(settings: Settings, num_prefill: int, num_decode: int) -> list[Program]:
    """The workers and the gateway. `settings` has the bus URL and the HTTP port that are really used."""
    shared = cores.parse(settings.compute.cores) or cores.usable()
    shares = cores.share(shared, num_prefill + num_decode)
    workers = [("prefill", number) for number in range(num_prefill)] + [
        ("decode", number) for number in range(num_decode)
    ]
    programs = [
        _program(f"{role}-{number}", role, _changed(_with_metrics(settings, index + 1), "compute", cores=share))
        for index, ((role, number), share) in enumerate(zip(workers, shares, strict=True))
    ]
    return [*programs, _program("gateway", "gateway", settings)]


def crowded(settings: Settings, num_workers: int) -> bool:
    """True if workers have to share cores."""
    return len(cores.parse(settings.compute.cores) or cores.usable()) < num_workers


def with_addresses(settings: Settings, bus_url: str, port: int) -> Settings:
    """`settings` as the children get them; bus.url is no longer "" nor api.port 0."""
    return _changed(_changed(settings, "bus", url=bus_url), "api", port=port)


def without_metrics(settings: Settings) -> Settings:
    """For the supervisor itself, which has nothing to measure."""
    return _changed(settings, "api", metrics_port=-1)


def _program(name: str, command: str, settings: Settings) -> Program:
    return Program(name, [*_KVRELAY, command], to_env(settings))


def _with_metrics(settings: Settings, index: int) -> Settings:
    """The gateway serves metrics on the port that was asked for, workers on the ones after it."""
    port = settings.api.metrics_port
    return _changed(settings, "api", metrics_port=port + index) if port > 0 else settings


def _changed(settings: Settings, group: Literal["compute", "api", "bus"], **values: Any) -> Settings:
    changed = msgspec.structs.replace(getattr(settings, group), **values)
    return msgspec.structs.replace(settings, **{group: changed})
