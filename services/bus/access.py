"""How a connection shows who it is, and checks whom it talks to: TLS, user and password, from the settings."""

import re
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from schemas.errors import Forbidden, SetupError
from services.settings import Bus as BusSettings

_VIOLATION = re.compile(r'permissions violation for (?P<what>publish|subscription) to "(?P<subject>[^"]*)"', re.I)


def options(settings: BusSettings) -> dict[str, Any]:
    """What nats-py is to be told. Raises `SetupError` for a file that cannot be used.

    The password is read again at each connect: a new one takes effect without a restart.
    """
    found: dict[str, Any] = {}
    if settings.tls_ca_file or settings.tls_cert_file:
        found["tls"] = _tls(settings)
    if settings.user:
        _password(settings.password_file)
        found |= {"user": settings.user, "password": lambda: _password(settings.password_file)}
    return found


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
