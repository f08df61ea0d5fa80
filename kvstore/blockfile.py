"""Where the file of a block lies in an NVMe tier's folder, and how it is opened."""

import os
import re
from pathlib import Path

from kvstore.tier import BlobName
from schemas.blob import KEY_BYTES

BLOCKS = "blocks"
QUARANTINE = "quarantine"
# Not following links and not waiting for pipes: whoever can write to the folder must not be able to hang a reader.
READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_UNSEEN = getattr(os, "O_NOATIME", 0)  # a read is no use: who uses a block touches its whole chain
_NAME = re.compile(r"[0-9a-f]{64}\.kvb")


def path_of(root: Path, name: BlobName) -> str:
    key = name.key.hex()
    return f"{root}/{BLOCKS}/{name.tenant}/{key[:2]}/{key}.kvb"


def key_in(file_name: str) -> bytes | None:
    """The key of the block that a file holds, going by its name."""
    return bytes.fromhex(file_name[: 2 * KEY_BYTES]) if _NAME.fullmatch(file_name) else None


def open_unseen(path: str) -> int:
    """For reading, without leaving a trace in its times where that is allowed. Raises `OSError`."""
    try:
        return os.open(path, READ | _UNSEEN)
    except PermissionError:  # another user's file
        return os.open(path, READ)
