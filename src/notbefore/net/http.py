"""``Http``: every request except those to IMDS.

It follows no redirects and bounds what it reads. Its errors tell whether to try again.

Proxies and CA bundles come from the environment (``HTTPS_PROXY``, ``NO_PROXY``,
``REQUESTS_CA_BUNDLE``), as in requests; a ``.netrc`` file, and a user and password in an address,
are not used.
"""

import io
import ipaddress
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache, partial
from http import client
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
import requests
import urllib3
from msgspec import Struct
from requests.adapters import HTTPAdapter
from requests.utils import select_proxy
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.util import Retry

from notbefore.errors import SendError

# bytes of an answer that are read: that of OTLP contains what was rejected
MAX_ANSWER: Final = 1024 * 1024
# a host name may have several addresses: each gets this part of the timeout
CONNECT_SHARE: Final = 4
MAX_EXCERPT: Final = 2_000  # characters of an answer in an error
# a wrong token or address: try again, somebody may correct it
BY_HAND: Final = frozenset({401, 403, 404})
PASSING: Final = BY_HAND | {408, 409, 421, 423, 425, 429}  # the 4xx after which to try again
# such as 103 (Early Hints); Python skips 100 itself, and 101 is never requested
INTERIM: Final = range(102, 200)
# the last 32 bits are the IPv4 address that is reached
NAT64: Final = ipaddress.ip_network("64:ff9b::/96")
NOT_PUBLIC: Final = (
    ipaddress.ip_network("168.63.129.16/32"),  # Azure's host agent: as private as IMDS
    ipaddress.ip_network(
        "192.0.0.0/24"
    ),  # IETF protocol assignments; one of them is another cloud's IMDS
    ipaddress.ip_network("::/96"),  # IPv4-compatible IPv6 addresses, deprecated
    ipaddress.ip_network("64:ff9b:1::/48"),  # NAT64 with a local prefix
    ipaddress.ip_network("2002::/16"),  # 6to4, which contains an IPv4 address
    ipaddress.ip_network("fec0::/10"),  # site-local, deprecated
)


def error_of_status(status: int, cause: str, retry_after: float | None = None) -> SendError | None:
    """Return the error for an HTTP status, with the text ``cause``.

    ``None``: the receiver accepted the delivery.

    It is permanent if a later attempt cannot succeed, and for a redirect, which is never followed.
    """
    if 200 <= status < 300:  # noqa: PLR2004 - the class of a status is its first digit
        return None
    passing = 500 <= status < 600 or status in PASSING  # noqa: PLR2004 - as above
    return SendError(
        cause, permanent=not passing, by_hand=status in BY_HAND, retry_after=retry_after
    )


class HttpResponse(Struct, frozen=True):
    """The answer, with any status."""

    status: int
    body: bytes
    retry_after: float | None = None  # seconds

    @property
    def cause(self) -> str:
        """The status and the ASCII part of the body, for an error.

        It may contain secrets: redact, then shorten it.
        """
        seen = bytes(
            octet
            for octet in self.body[: 4 * MAX_EXCERPT]
            if (bytes([octet]).isascii() and chr(octet).isprintable()) or octet in b"\n\t"
        )
        text = " ".join(seen.decode().split())[:MAX_EXCERPT]
        return f"{self.status}: {text}" if text else str(self.status)

    def said(self) -> Any:
        """Return the decoded JSON of the body; ``None`` if it is not JSON."""
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return msgspec.json.decode(self.body)
        return None

    def check(self, accepted: bool = True, of: str = "") -> None:  # noqa: FBT001, FBT002 - reads well
        """Raise ``SendError`` unless it is 2xx and ``accepted``: from the service ``of``, not from
        a captive portal.
        """
        error = error_of_status(self.status, self.cause, self.retry_after)
        if error is not None:
            raise error
        if not accepted:
            raise SendError(f"this is not an answer of {of}: {self.cause}")


class Http:
    """Connections that are kept for the next message.

    ``timeout``: seconds for a request and its answer. ``guarded``: connect only to public
    addresses.
    """

    def __init__(
        self,
        timeout: float,
        *,
        ca_file: str | None = None,
        cert: tuple[str, str | None] | None = None,
        guarded: bool = False,
    ) -> None:
        self._timeout = timeout
        self._guarded = guarded
        # without a session: no cookies, no redirects, nothing of a .netrc
        self._adapter = _Adapter(guarded=guarded)
        # the environment may name proxies, and a CA bundle: it does not change, so it is read once
        # for an address
        merge: Any = partial(requests.Session().merge_environment_settings, stream=True)
        self._settings = lru_cache(
            lambda url: merge(url, proxies={}, verify=ca_file or True, cert=cert)
        )

    def post(self, url: str, headers: Mapping[str, str], body: bytes = b"") -> HttpResponse:
        """Send, and return the answer with any status; raises ``SendError`` if there is none."""
        try:
            request = requests.Request(
                "POST", url, {"User-Agent": "notbefore", **headers}, data=body
            )
            # a user and password in the address replace no header
            request.auth = lambda prepared: prepared
            settings = self._settings(url)
            if self._guarded and select_proxy(url, settings["proxies"]) is not None:
                check_host(url)
            # not in its stubs
            timeout: Any = urllib3.Timeout(self._timeout, connect=self._timeout / CONNECT_SHARE)
            with self._adapter.send(request.prepare(), timeout=timeout, **settings) as response:
                content = bytearray()  # only the beginning of a long answer is needed
                while len(content) < MAX_ANSWER and (
                    chunk := response.raw.read1(4096, decode_content=True)
                ):
                    content += chunk
                retry_after = _retry_after(response.headers.get("Retry-After"))
                return HttpResponse(response.status_code, bytes(content[:MAX_ANSWER]), retry_after)
        except (
            requests.RequestException,
            urllib3.exceptions.HTTPError,
            OSError,
            ValueError,
        ) as error:
            proxy = "the proxy: " if isinstance(error, requests.exceptions.ProxyError) else ""
            # only host and port: the rest of the address may be secret
            raise SendError(
                f"{urlsplit(url).netloc.rpartition('@')[2]}: {proxy}{_reason(error)}"
            ) from None

    def close(self) -> None:
        """Close the connections."""
        self._adapter.close()


def _retry_after(value: str | None) -> float | None:
    if value is not None:
        with suppress(urllib3.exceptions.InvalidHeader, ValueError, OverflowError):
            return max(0.0, float(Retry().parse_retry_after(value)))
    return None


def _reason(error: BaseException) -> str:
    """Return the innermost cause that is useful: ``Connection refused``."""
    causes = (getattr(error, "reason", None), error.__cause__, error.__context__, *error.args[:1])
    for inner in causes:
        if isinstance(inner, BaseException):
            return _reason(inner)
    if isinstance(error, (requests.RequestException, urllib3.exceptions.HTTPError)):
        return type(error).__name__
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"


# ---- connections


class _Answer(client.HTTPResponse):
    """An answer that must end within the timeout. Interim answers (1xx) before it are skipped.

    The timeout of a socket is only for the next bytes: with it alone, an answer that drips would
    never end.
    """

    def __init__(self, sock: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        raw: Any = self.fp
        self.fp = io.BufferedReader(_UntilDeadline(sock, raw.detach()))

    def _read_status(self) -> tuple[str, int, str]:
        while (found := super()._read_status())[1] in INTERIM:  # type: ignore[misc] # not in its stubs; urllib3 uses it
            client.parse_headers(self.fp)
        return found  # type: ignore[no-any-return] # as above


class _UntilDeadline(io.RawIOBase):
    """The bytes of a socket, whose timeout is the limit for all of them together."""

    def __init__(self, sock: socket.socket, raw: socket.SocketIO) -> None:
        self._sock, self._raw = sock, raw
        self._deadline = time.monotonic() + (sock.gettimeout() or 0.0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        self._sock.settimeout(left)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Guarded:
    """A mixin for urllib3's connections: sends nothing to an address that is not public."""

    def _new_conn(self) -> socket.socket:
        sock: socket.socket = super()._new_conn()  # type: ignore[misc] # of the other base class
        try:
            check_address(sock.getpeername()[0])  # the real address: a name may have a new one
        except BaseException:
            sock.close()
            raise
        return sock


def _pools(*mixins: type) -> dict[str, Any]:
    """Return urllib3's classes of pools; their connections have these mixins, and our answers."""
    found: dict[str, Any] = {}
    for pool in (HTTPConnectionPool, HTTPSConnectionPool):
        connection = type("Connection", (*mixins, pool.ConnectionCls), {"response_class": _Answer})
        found[pool.scheme] = type("Pool", (pool,), {"ConnectionCls": connection})
    return found


class _Adapter(HTTPAdapter):
    def __init__(self, *, guarded: bool) -> None:
        super().__init__()
        self.poolmanager.pool_classes_by_scheme = _pools(_Guarded) if guarded else _pools()

    def proxy_manager_for(self, *args: Any, **options: Any) -> Any:
        manager = super().proxy_manager_for(*args, **options)
        manager.pool_classes_by_scheme = _pools()  # the address of the proxy may be private
        return manager


def check_address(address: str) -> None:
    """Raise ``SendError`` for an address that is not public."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF) if ip in NAT64 else ip.ipv4_mapped
        ip = inner or ip
    if not ip.is_global or ip.is_multicast or any(ip in network for network in NOT_PUBLIC):
        raise SendError(
            f"{ip} is not a public address: set `allow_private: true` if it is the right one",
            permanent=True,
        )


def check_host(url: str) -> None:
    """Raise as ``check_address`` for the host to which a proxy is to connect, and if it has no
    address here.
    """
    host = urlsplit(url).hostname or ""
    try:
        found = socket.getaddrinfo(host, None)
    except (OSError, ValueError):
        raise SendError(
            f"{host} cannot be resolved here, and the proxy may connect to a private address: set"
            " `allow_private: true` if you trust the name"
        ) from None
    for one in found:
        check_address(str(one[4][0]))
