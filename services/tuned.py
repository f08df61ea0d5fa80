"""What `kvrelay tune` chose for this machine: defaults of some settings, below what files and the environment say.

`<data folder>/tuned.json` has a choice for each model, dtype and quantisation. It counts on the machine that it was
made on: elsewhere the plain defaults do.
"""

import os
import platform
from pathlib import Path
from typing import Any

import msgspec

from schemas.errors import SetupError
from services.settings import Settings, value_of

FILE = "tuned.json"
KEYS = ("scheduler.chunk_tokens", "scheduler.token_budget", "scheduler.max_sequences")
_SUBJECT = ("compute.model", "compute.dtype", "kv.quantisation", "kv.block_tokens")


class Choice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`subject`: the settings that it was measured with; `values`: those that were chosen, by key."""

    machine: str
    subject: dict[str, str | int]
    values: dict[str, int]


def path_of(data_dir: str | Path) -> Path:
    return Path(data_dir) / FILE


def usable_cores() -> list[int]:
    """Those that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def machine() -> str:
    """Differs where a measurement says nothing: another processor, another number of cores."""
    return f"{_processor() or platform.machine()}, {os.cpu_count()} cores, {len(usable_cores())} usable"


def subject_of(settings: Settings) -> dict[str, str | int]:
    return {name: value_of(settings, name) for name in _SUBJECT}


def choice_for(settings: Settings) -> Choice | None:
    """Raises `SetupError` if the file cannot be understood."""
    here, subject = machine(), subject_of(settings)
    found = [choice for choice in read(settings.kv.data_dir) if (choice.machine, choice.subject) == (here, subject)]
    return found[0] if found else None


def read(data_dir: str | Path) -> list[Choice]:
    """Raises `SetupError` for a file that is no list of choices."""
    path = path_of(data_dir)
    try:
        choices = msgspec.json.decode(path.read_bytes(), type=list[Choice])
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, msgspec.DecodeError) as error:
        raise SetupError(f"{path} cannot be read: {error}; remove it, then run `kvrelay tune` again") from error
    if unknown := {name for choice in choices for name in choice.values if name not in KEYS}:
        raise SetupError(f"{path} sets {', '.join(sorted(unknown))}; remove it, then run `kvrelay tune` again")
    return choices


def keep(settings: Settings, values: dict[str, int], where: str) -> Path:
    """For the machine `where`, and for what `settings` compute; the file."""
    choice = Choice(machine=where, subject=subject_of(settings), values=values)
    same = (choice.machine, choice.subject)
    others = [other for other in read(settings.kv.data_dir) if (other.machine, other.subject) != same]
    path = path_of(settings.kv.data_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(f".{os.getpid()}.part")
    beside.write_bytes(msgspec.json.format(msgspec.json.encode([*others, choice])))
    os.replace(beside, path)
    return path


def reset(data_dir: str | Path) -> bool:
    """Forgets all choices; False if there were none."""
    path = path_of(data_dir)
    there = path.exists()
    path.unlink(missing_ok=True)
    return there


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    told: dict[str, Any] = dict(line.partition(":")[::2] for line in lines)
    return next((value.strip() for name, value in told.items() if name.strip() == "model name"), "")
