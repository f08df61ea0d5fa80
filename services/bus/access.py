"""How a connection shows who it is, and checks whom it talks to, from the settings: TLS, a password or a key."""

import re
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from nats import errors as nats_errors

from schemas.errors import Forbidden, SetupError
from services.bus.client import ReconnectingClient
from services.bus.credentials import Credentials, read_creds, read_nkey
from services.settings import Bus as BusSettings

T = TypeVar("T")

_VIOLATION = re.compile(r'permissions violation for (?P<what>publish|subscription) to "(?P<subject>[^"]*)"', re.I)


def options(settings: BusSettings, client: ReconnectingClient) -> dict[str, Any]:
    """What nats-py is to be told. Raises `SetupError` for a file that cannot be used.

    Passwords and keys are read again at each connect: new ones take effect without a restart. A file that cannot be
    used then is tried again until it can.
    """
    found: dict[str, Any] = {}
    shown = [name for name in ("user", "creds_file", "nkey_file") if getattr(settings, name)]
    if len(shown) > 1:
        raise SetupError(f"{' and '.join(f'bus.{name}' for name in shown)}: NATS takes one of them", param="bus.user")
    if settings.tls_ca_file or settings.tls_cert_file:
        found["tls"] = _tls(settings)
    if settings.user:
        _password(settings.password_file)
        found |= {"user": settings.user, "password": _later(lambda: _password(settings.password_file))}
    elif settings.creds_file or settings.nkey_file:
        found |= _signing(settings, client)
    return found


def _signing(settings: BusSettings, client: ReconnectingClient) -> dict[str, Any]:
    """NATS asks for a signature, and then either for the JWT that names its key, or for the key."""

    def read() -> Credentials:
        return read_creds(settings.creds_file) if settings.creds_file else read_nkey(settings.nkey_file)

    def sign(nonce: str) -> bytes:
        found = read()
        if not found.jwt:
            client.shown_key = found.public_key
        return found.sign(nonce)

    read()
    jwt = {"user_jwt_cb": _later(lambda: bytearray(read().jwt.encode()))} if settings.creds_file else {}
    return {"signature_cb": _later(sign), **jwt}


def _later(read: Callable[..., T]) -> Callable[..., T]:
    """nats-py goes on trying after errors of its own, and stops for ever at any other."""

    def again(*asked: Any) -> T:
        try:
            return read(*asked)
        except SetupError as error:
            raise nats_errors.Error(error.message) from error

    return again


def _tls(settings: BusSettings) -> ssl.SSLContext:
    """TLS 1.2 or later, with the server's name checked."""
    file = ""
    try:
        file = settings.tls_ca_file
        context = ssl.create_default_context(cafile=file or None)
        if file := settings.tls_cert_file:
            context.load_cert_chain(file, settings.tls_key_file)
    except OSError as error:  # ssl.SSLError is one
        raise SetupError(f"{file} cannot be used for TLS with NATS (bus.tls_...): {error}") from error
    return context


def _password(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"bus.password_file = {file!r} cannot be read: {error}", param="bus.password_file") from error


class Asked:
    """What was asked of NATS and not answered yet, by subject: a refusal comes apart from any answer, and names it."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Callable[[Forbidden], None]]] = {}

    @contextmanager
    def waiting(self, subject: str, refuse: Callable[[Forbidden], None]) -> Iterator[None]:
        """`refuse` is called if NATS forbids this connection to publish on `subject`."""
        key = subject.lower()  # as nats-py hands on what the server says
        self._waiting.setdefault(key, []).append(refuse)
        try:
            yield
        finally:
            self._waiting[key].remove(refuse)
            if not self._waiting[key]:
                del self._waiting[key]

    def violation(self, error: Exception) -> Forbidden | None:
        """The error that `error` stands for, told to whoever waits for an answer; None for any other one."""
        found = _VIOLATION.search(str(error))
        if found is None:
            return None
        forbidden = Forbidden(f"NATS does not let this user {_VERBS[found['what'].lower()]} {found['subject']}")
        if found["what"].lower() == "publish":
            for refuse in list(self._waiting.get(found["subject"].lower(), ())):
                refuse(forbidden)
        return forbidden


_VERBS = {"publish": "publish to", "subscription": "read"}
