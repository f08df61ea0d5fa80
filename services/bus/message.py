"""What a NATS message is on the wire."""

from collections.abc import Mapping

from nats.aio.msg import Msg

Headers = Mapping[str, str]

HEADER_LINE_BYTES = len("NATS/1.0\r\n\r\n")


def status(message: Msg) -> str:
    """The status of a control message ("404", "503", ...), "" for an ordinary one."""
    return (message.headers or {}).get("Status", "") if not message.data else ""


def header_bytes(headers: Headers | None) -> int:
    """Bytes that `headers` take on the wire."""
    if not headers:
        return 0
    return HEADER_LINE_BYTES + sum(len(name) + len(value.encode()) + 4 for name, value in headers.items())
