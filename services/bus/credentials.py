"""Keys that sign what NATS asks: of a `.creds` file as `nsc` writes it, or of a file with a seed alone.

nats-py reads such files too, but never comes back from one that is cut off, and gives up for good on a bad one.
"""

import base64
import re
from pathlib import Path
from typing import NamedTuple

from schemas.errors import SetupError

_JWT = re.compile(r"-{3,}BEGIN NATS USER JWT-{3,}\s+([\w.-]+)\s+-{3,}END")
_SEED = re.compile(r"-{3,}BEGIN USER NKEY SEED-{3,}\s+(\w+)\s+-{3,}END")


class Credentials(NamedTuple):
    """`jwt`: "" where the server knows the key itself."""

    public_key: str
    seed: str
    jwt: str = ""

    def sign(self, nonce: str) -> bytes:
        """As CONNECT wants it, in base64."""
        import nkeys

        return base64.b64encode(nkeys.from_seed(self.seed.encode()).sign(nonce.encode()))


def read_creds(file: str) -> Credentials:
    """Raises `SetupError` for what cannot be read, or is not whole."""
    text = _text(file, "bus.creds_file")
    jwt, seed = _JWT.search(text), _SEED.search(text)
    if jwt is None or seed is None:
        raise SetupError(f"bus.creds_file = {file!r} has no user JWT with a seed behind it", param="bus.creds_file")
    return _checked(file, "bus.creds_file", seed[1], jwt[1])


def read_nkey(file: str) -> Credentials:
    """Raises `SetupError`."""
    return _checked(file, "bus.nkey_file", _text(file, "bus.nkey_file").strip())


def _text(file: str, param: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"{param} = {file!r} cannot be read: {error}", param=param) from error


def _checked(file: str, param: str, seed: str, jwt: str = "") -> Credentials:
    import nkeys  # only here and where it signs: few need it, and it loads libsodium

    try:
        key = nkeys.from_seed(seed.encode())
        public_key = key.public_key.decode()
    except (nkeys.NkeysError, ValueError, LookupError) as error:
        raise SetupError(f"{param} = {file!r} holds no seed: {type(error).__name__}", param=param) from error
    if not seed.startswith("SU"):
        raise SetupError(f"{param} = {file!r} holds no user's seed (SU...), but another one", param=param)
    return Credentials(public_key, seed, jwt)
