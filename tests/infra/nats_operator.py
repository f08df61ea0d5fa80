"""What `nsc` would make: an operator, accounts and users, each a JWT signed by the one above it (NATS ADR-14)."""

import base64
import json
import os
import time
from pathlib import Path
from typing import Any

import nkeys

CREDS = """-----BEGIN NATS USER JWT-----
{jwt}
------END NATS USER JWT------

************************* IMPORTANT *************************
NKEY Seed printed below can be used to sign and prove identity.

-----BEGIN USER NKEY SEED-----
{seed}
------END USER NKEY SEED------
"""
UNLIMITED = {"subs": -1, "data": -1, "payload": -1}
ACCOUNT_LIMITS = {
    **UNLIMITED, "conn": -1, "leaf": -1, "imports": -1, "exports": -1, "wildcards": True,
}  # fmt: skip
JETSTREAM_LIMITS = {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}


class Key:
    """A key pair of one kind: nkeys.PREFIX_BYTE_..."""

    def __init__(self, kind: int) -> None:
        self.seed = nkeys.encode_seed(os.urandom(32), kind).decode()
        self._pair = nkeys.from_seed(self.seed.encode())
        self.public = self._pair.public_key.decode()

    def jwt(self, subject: "Key", kind: str, **claims: Any) -> str:
        """About `subject`, signed by this key."""
        body = {
            "jti": os.urandom(16).hex(), "iat": int(time.time()), "iss": self.public, "sub": subject.public,
            "name": kind, "nats": {"type": kind, "version": 2, **claims},
        }  # fmt: skip
        signed = ".".join(_part(json.dumps(part).encode()) for part in ({"typ": "JWT", "alg": "ed25519-nkey"}, body))
        return f"{signed}.{_part(self._pair.sign(signed.encode()))}"


class Operator:
    """`config`: lines for a nats-server that trusts it. Users are of one account, which has JetStream."""

    def __init__(self) -> None:
        key, system = Key(nkeys.PREFIX_BYTE_OPERATOR), Key(nkeys.PREFIX_BYTE_ACCOUNT)
        self._account = Key(nkeys.PREFIX_BYTE_ACCOUNT)
        ours = key.jwt(self._account, "account", limits={**ACCOUNT_LIMITS, **JETSTREAM_LIMITS})
        theirs = key.jwt(system, "account", limits=ACCOUNT_LIMITS)
        self.config = (
            f"operator: {key.jwt(key, 'operator')}\nsystem_account: {system.public}\nresolver: MEMORY\n"
            f"resolver_preload: {{ {self._account.public}: {ours}, {system.public}: {theirs} }}\n"
        )

    def write_creds(self, file: Path, **permissions: Any) -> None:
        """Of a new user."""
        user = Key(nkeys.PREFIX_BYTE_USER)
        jwt = self._account.jwt(user, "user", **UNLIMITED, **permissions)
        file.write_text(CREDS.format(jwt=jwt, seed=user.seed), encoding="utf-8")


def _part(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
