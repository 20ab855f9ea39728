"""The guard of addresses: a request of a webhook leads to public addresses only."""

import socket
from urllib.parse import urlsplit

from notbefore.config.addresses import not_public
from notbefore.errors import SendError


def check_address(address: str) -> None:
    """Raise ``SendError`` for an address that is not public."""
    reason = not_public(address)
    if reason:
        raise SendError(reason, permanent=True)


def check_host(host: str) -> None:
    """Raise ``SendError`` if an address of a host is not public.

    Raises ``OSError`` or ``ValueError`` if the host cannot be resolved.
    """
    for *_, endpoint in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
        check_address(str(endpoint[0]))


def check_proxied(url: str) -> None:
    """Raise ``SendError`` if the host to which a proxy is to connect is not public.

    Also raise it if the host cannot be resolved here: the proxy may know a private address of it.
    """
    host = urlsplit(url).hostname or ""
    try:
        check_host(host)
    except (OSError, ValueError):
        raise SendError(
            f"{host} cannot be resolved here, and the proxy may connect to a private address: set"
            " `allow_private: true` if you trust the name"
        ) from None
