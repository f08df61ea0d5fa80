"""A name for a folder that several processes may share, the same for all who see it, on whatever machine."""

import os
import secrets
from contextlib import suppress
from pathlib import Path

_FILE = "place"
_MAX_BYTES = 64


def place_of(root: Path) -> str:
    """Made by the first who asks. Empty where the folder cannot be read or written: then nobody shares it."""
    path = root / _FILE
    beside = root / f"{_FILE}.{secrets.token_hex(8)}"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            beside.write_bytes(secrets.token_hex(16).encode())
            with suppress(FileExistsError):
                os.link(beside, path)  # the first one wins, and nobody sees half of it
            beside.unlink()
        with path.open("rb") as file:
            return file.read(_MAX_BYTES).decode("ascii", "replace")
    except OSError:
        return ""
