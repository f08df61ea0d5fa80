"""Who can reach a listener, and what it must ask of them."""

import ipaddress
import socket
import ssl

from schemas.errors import SetupError
from services.settings import Api


def refuse_open_door(api: Api) -> None:
    """Raises `SetupError` where anybody on the network could ask, and nobody said that this is meant."""
    if api.keys_file or api.insecure or _is_loopback(api.host):
        return
    raise SetupError(
        f"api.host = {api.host!r} can be reached from other machines, and without api.keys_file anybody there could "
        "ask: make keys with `kvrelay keys add --tenant NAME`, or say --insecure if the network is to be trusted",
        param="api.keys_file",
    )


def tls_context(api: Api) -> ssl.SSLContext | None:
    """None: plain HTTP. Raises `SetupError` for files that cannot be used."""
    if not api.tls_cert_file:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(api.tls_cert_file, api.tls_key_file)
    except OSError as error:  # ssl.SSLError is one
        raise SetupError(
            f"api.tls_cert_file = {api.tls_cert_file!r} and api.tls_key_file cannot be used: {error}",
            param="api.tls_cert_file",
        ) from error
    return context


def _is_loopback(host: str) -> bool:
    """Of a name all addresses count; one that is unknown here is taken for reachable."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
        return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)
    except (OSError, UnicodeError, ValueError):
        return False
