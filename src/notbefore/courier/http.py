"""``Http``: one exchange as all sinks need it: no redirects, bounded answers, errors that say whether to try again.

Proxies and CA bundles are taken from the environment (``HTTPS_PROXY``, ``NO_PROXY``, ``REQUESTS_CA_BUNDLE``), as
requests does it; a ``.netrc`` is not.
"""

import os
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar, Final, Literal
from urllib.parse import unquote, urlsplit

import certifi
import urllib3
from msgspec import Struct
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.util import Retry

from notbefore.courier.addresses import PrivateAddressError, check_address, check_target
from notbefore.courier.head_deadline import HeadDeadlineMixin
from notbefore.courier.retry import error_of_status
from notbefore.errors import SendError

MAX_ANSWER: Final = 64 * 1024  # bytes of an answer that are looked at
CONNECT_SHARE: Final = 4  # the timeout by this is for one address of a name, so that the next ones can be tried
SHORTEST_CONNECT: Final = 0.25  # seconds that an address has at least, where the timeout is as long
MAX_CAUSE: Final = 2_000  # characters of an answer in an error


class HttpResponse(Struct, frozen=True):
    """The answer, whatever its status."""

    status: int
    body: bytes
    retry_after: float | None = None  # seconds

    @property
    def cause(self) -> str:
        """Status and body, for an error's text. Who keeps it removes secrets first, and shortens it then."""
        text = " ".join(self.body.decode(errors="replace").split())[:MAX_CAUSE]
        return f"{self.status}: {text}" if text else str(self.status)

    def check(self) -> None:
        """Raise ``SendError`` unless the status is 2xx."""
        error = error_of_status(self.status, self.cause, self.retry_after)
        if error is not None:
            raise error


class Http:
    """Connections that are kept for the next message.

    ``timeout``: seconds for an exchange. ``guarded``: to public addresses alone. ``most``: bytes of an answer that are
    read.
    """

    def __init__(
        self,
        timeout: float,
        *,
        ca_file: str | None = None,
        cert: tuple[str, str | None] | None = None,
        guarded: bool = False,
        most: int = MAX_ANSWER,
    ) -> None:
        self._timeout = timeout
        self._guarded = guarded
        self._most = most
        ca = ca_file or os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE") or certifi.where()
        self._options: dict[str, Any] = {
            "cert_reqs": "CERT_REQUIRED",
            "ca_cert_dir" if Path(ca).is_dir() else "ca_certs": ca,
            "cert_file": cert[0] if cert is not None else None,
            "key_file": cert[1] if cert is not None else None,
        }
        self._direct = _with_deadlines(urllib3.PoolManager(**self._options), guarded=guarded)
        self._proxies: dict[str, urllib3.PoolManager] = {}  # by their addresses
        self._proxy_of: dict[str, str | None] = {}  # by address

    def post(self, url: str, body: bytes, headers: Mapping[str, str], timeout: float | None = None) -> HttpResponse:
        """Send, and return the answer, whatever it is; raises ``SendError`` where there is none.

        ``timeout`` in seconds, instead of the usual one.
        """
        return self._exchange("POST", url, body, headers, timeout)

    def ask(self, method: Literal["GET", "HEAD"], url: str, headers: Mapping[str, str]) -> HttpResponse:
        """Ask for what changes nothing; as ``post`` otherwise."""
        return self._exchange(method, url, None, headers, None)

    def _exchange(
        self, method: str, url: str, body: bytes | None, headers: Mapping[str, str], timeout: float | None
    ) -> HttpResponse:
        timeout = timeout or self._timeout
        deadline = time.monotonic() + timeout
        connect = max(timeout / CONNECT_SHARE, min(timeout, SHORTEST_CONNECT))
        try:
            response = self._manager(url).request(
                method,
                url,
                body=body,
                headers={"User-Agent": "notbefore", **headers},
                timeout=urllib3.Timeout(connect=connect, read=timeout),
                redirect=False,
                retries=False,
                preload_content=False,
            )
            with closing(response):  # where it was read to its end, its connection is kept
                content = _bounded(response, deadline, self._most)
            return HttpResponse(response.status, content, _retry_after(response.headers.get("Retry-After")))
        except PrivateAddressError as error:
            raise SendError(str(error), permanent=True) from None
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            # its text would hold the whole address
            raise SendError(f"{_receiver(url)}: {_reason(error)}") from None

    def _manager(self, url: str) -> urllib3.PoolManager:
        """Whose connections lead there: directly, or through the proxy that the environment names."""
        if url not in self._proxy_of:
            self._proxy_of[url] = _proxy(url)
        proxy = self._proxy_of[url]
        if self._guarded:
            check_target(url, proxied=proxy is not None)
        if proxy is None:
            return self._direct
        if proxy not in self._proxies:
            self._proxies[proxy] = _through(proxy, self._options)
        return self._proxies[proxy]

    def close(self) -> None:
        """Close the connections."""
        for manager in (self._direct, *self._proxies.values()):
            manager.clear()


def _bounded(response: urllib3.BaseHTTPResponse, deadline: float, most: int) -> bytes:
    content = bytearray()
    while chunk := response.read1(4096, decode_content=True):  # what is there, however little it is
        content += chunk
        if len(content) > most:
            return bytes(content[:most])  # the status counts, the rest is not needed
        if time.monotonic() > deadline:
            raise SendError("the answer did not end in time")
    return bytes(content)


def _retry_after(value: str | None) -> float | None:
    if value is None:
        return None
    try:
        return max(0.0, float(Retry().parse_retry_after(value)))
    except (urllib3.exceptions.InvalidHeader, ValueError, OverflowError):
        return None


def _receiver(url: str) -> str:
    """Host and port of an address, without what may be secret in it."""
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port}" if parts.port is not None else str(parts.hostname)


def _reason(error: BaseException) -> str:
    """The innermost reason that says something: ``Connection refused``."""
    seen: BaseException = error
    while True:
        inner: Any = getattr(seen, "reason", None) or seen.__cause__ or seen.__context__
        if isinstance(inner, BaseException):
            seen = inner
        elif seen.args and isinstance(seen.args[0], BaseException):
            seen = seen.args[0]
        else:
            break
    if isinstance(seen, urllib3.exceptions.HTTPError):
        return type(seen).__name__
    return getattr(seen, "strerror", None) or f"{type(seen).__name__}: {seen}"


# ---- connections


class _ConnectionMixin(HeadDeadlineMixin):
    """``guarded``: no byte is sent to an address that is not public."""

    guarded: ClassVar[bool]

    def _new_conn(self) -> socket.socket:
        sock: socket.socket = super()._new_conn()  # type: ignore[misc] # of the class beside it
        try:
            if self.guarded:
                check_address(sock.getpeername()[0])  # the address it really has: a name may change its mind
        except BaseException:
            sock.close()
            raise
        return sock


def _with_deadlines(manager: urllib3.PoolManager, *, guarded: bool) -> urllib3.PoolManager:
    """Have a manager make connections of ours."""
    manager.pool_classes_by_scheme = {
        pool.scheme: type(
            "Pool",
            (pool,),
            {"ConnectionCls": type("Connection", (_ConnectionMixin, pool.ConnectionCls), {"guarded": guarded})},
        )
        for pool in (HTTPConnectionPool, HTTPSConnectionPool)
    }
    return manager


# ---- proxies


def _proxy(url: str) -> str | None:
    """The proxy that the environment, or another system, names for an address; ``None``: there is none."""
    if sys.platform == "linux" and not any(name.lower().endswith("_proxy") for name in os.environ):
        return None
    from requests.utils import get_environ_proxies, prepend_scheme_if_needed, select_proxy  # noqa: PLC0415 - 3 MB

    found = select_proxy(url, get_environ_proxies(url))
    return str(prepend_scheme_if_needed(found, "http")) if found else None  # type: ignore[no-untyped-call]


def _through(proxy: str, options: Mapping[str, Any]) -> urllib3.PoolManager:
    """Connections through a proxy, whose own address may be a private one."""
    parts = urlsplit(proxy)
    if parts.scheme.startswith("socks"):
        from urllib3.contrib.socks import SOCKSProxyManager  # noqa: PLC0415 - needs PySocks, which few have

        return SOCKSProxyManager(proxy, **options)
    user = f"{unquote(parts.username)}:{unquote(parts.password or '')}" if parts.username else None
    headers = urllib3.make_headers(proxy_basic_auth=user) if user else None
    return _with_deadlines(urllib3.ProxyManager(proxy, proxy_headers=headers, **options), guarded=False)
