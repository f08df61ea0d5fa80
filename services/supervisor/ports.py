"""TCP ports of this machine."""

import socket

from schemas.errors import SetupError


def free_port(host: str) -> int:
    """A port that nobody listens on now."""
    with socket.create_server((host, 0)) as server:
        port: int = server.getsockname()[1]
        return port


def settle_port(host: str, port: int) -> int:
    """`port` if it can be listened on, any free one for 0. Raises `SetupError` with what to do."""
    try:
        with socket.create_server((host, port)) as server:
            chosen: int = server.getsockname()[1]
            return chosen
    except OSError as error:
        raise SetupError(
            f"api.port = {port} on {host} cannot be used: {error.strerror}; "
            "stop who uses it, give --port another, or --port 0 for any free one",
            param="api.port",
        ) from error
