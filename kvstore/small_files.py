"""Small files beside the blobs: written beside and renamed, read whole, never more than a limit."""

import os
import secrets
from contextlib import suppress
from pathlib import Path

MAX_BYTES = 16 << 20


def write(path: Path, data: bytes) -> None:
    """Whole or not at all, also after a power cut. Raises `OSError`."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with beside.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError:
        with suppress(OSError):
            beside.unlink()
        raise


def read(path: Path) -> bytes | None:
    """None: it is gone, or too large to be ours. Raises `OSError` otherwise."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
        return data if len(data) <= MAX_BYTES else None
    return None


def names(folder: Path, suffix: str) -> list[str]:
    """Without the suffix, sorted; files that are being written are left out."""
    with suppress(FileNotFoundError, NotADirectoryError):
        found = [name for name in os.listdir(folder) if name.endswith(suffix) and not name.startswith(".")]
        return sorted(name.removesuffix(suffix) for name in found)
    return []
