"""The file of API keys: who may ask, for which tenant. It holds hashes; a key is shown once, when it is made.

A key is `kvr-<id>-<secret>`. The secret has 256 random bits, so a plain SHA-256 of the whole key says nothing of it.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from schemas.errors import InvalidRequest, JobNotFound, SetupError
from schemas.subjects import check_slug

MAX_NAME_CHARS = 100

_KEY = re.compile(r"kvr-([0-9a-f]{8})-[A-Za-z0-9_-]{43}")


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`name` is the operator's own note. Times are UTC, ISO 8601."""

    id: str
    tenant: str
    hash: str
    created: str
    name: str = ""
    revoked: str | None = None


class KeyList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: list[ApiKey]


def id_of(key: str) -> str | None:
    """None for what is no key of ours."""
    found = _KEY.fullmatch(key)
    return found[1] if found else None


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def read(file: Path) -> list[ApiKey]:
    """Raises `SetupError` for a file that is missing, cannot be read, or is no file of keys."""
    try:
        found = msgspec.json.decode(file.read_bytes(), type=KeyList).keys
        for key in found:
            check_slug(key.tenant, "tenant")
    except FileNotFoundError:
        raise SetupError(
            f"api.keys_file = {str(file)!r} does not exist: `kvrelay keys add --tenant NAME` makes it",
            param="api.keys_file",
        ) from None
    except (OSError, msgspec.DecodeError, InvalidRequest) as error:
        raise SetupError(f"api.keys_file = {str(file)!r} cannot be used: {error}", param="api.keys_file") from error
    return found


def add(file: Path, tenant: str, name: str = "") -> str:
    """A new key, which nothing but its owner will know. Raises `InvalidRequest` or `SetupError`."""
    check_slug(tenant, "tenant")
    if len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise InvalidRequest(f"name must be at most {MAX_NAME_CHARS} printable characters", param="name")

    def append(keys: list[ApiKey]) -> list[ApiKey]:
        return [*keys, ApiKey(id=id_, tenant=tenant, hash=digest(key), created=_now(), name=name)]

    id_ = secrets.token_hex(4)
    key = f"kvr-{id_}-{secrets.token_urlsafe(32)}"
    _change(file, append)
    return key


def revoke(file: Path, id_: str) -> ApiKey:
    """It stays listed. Raises `JobNotFound` if there is none of that id."""

    def mark(keys: list[ApiKey]) -> list[ApiKey]:
        found = next((key for key in keys if key.id == id_), None)
        if found is None:
            raise JobNotFound(f"there is no key {id_[:80]!r} in {file}: `kvrelay keys ls` lists them")
        revoked.append(found if found.revoked else msgspec.structs.replace(found, revoked=_now()))
        return [revoked[0] if key.id == id_ else key for key in keys]

    revoked: list[ApiKey] = []
    _change(file, mark)
    return revoked[0]


def _change(file: Path, change: Callable[[list[ApiKey]], list[ApiKey]]) -> None:
    """Written beside and renamed, by one process at a time; keeps the mode and the owner that the file had."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with _locked(file):
            keys = change(read(file) if file.exists() else [])
            beside = file.with_name(f".{file.name}.{os.getpid()}")
            with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
                if file.exists():
                    before = file.stat()
                    os.fchmod(out.fileno(), before.st_mode & 0o777)
                    with contextlib.suppress(PermissionError):
                        os.fchown(out.fileno(), before.st_uid, before.st_gid)
                out.write(msgspec.json.format(msgspec.json.encode(KeyList(keys)), indent=2) + b"\n")
                out.flush()
                os.fsync(out.fileno())
            beside.rename(file)
    except OSError as error:
        raise SetupError(f"api.keys_file = {str(file)!r} cannot be written: {error}", param="api.keys_file") from error


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.with_name(f".{file.name}.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
