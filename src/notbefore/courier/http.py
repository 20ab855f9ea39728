"""``Http``: one exchange as all sinks need it: no redirects, bounded answers, errors that say whether to try again.

Proxies and CA bundles are taken from the environment (``HTTPS_PROXY``, ``NO_PROXY``, ``REQUESTS_CA_BUNDLE``), as
requests does it; a ``.netrc`` is not.
"""

import os
import socket
import time
from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal
from urllib.parse import urlsplit

import msgspec
import requests
import urllib3
from msgspec import Struct
from requests.adapters import HTTPAdapter
from requests.utils import get_environ_proxies, select_proxy
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.util import Retry

from notbefore.courier.addresses import PrivateAddressError, UnresolvedError, check_address, check_target
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
        """Status and what of the body is ASCII, for an error's text. Who keeps it removes secrets, then shortens it."""
        seen = bytes(octet for octet in self.body if 0x20 <= octet < 0x7F or octet in b"\n\t")  # noqa: PLR2004 - ASCII
        text = " ".join(seen.decode().split())[:MAX_CAUSE]
        return f"{self.status}: {text}" if text else str(self.status)

    def said(self) -> Any:
        """The body as JSON; raises ``ValueError`` where it is none."""
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(str(error)) from None

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
        self._session = requests.Session()
        self._session.trust_env = False  # no .netrc; and it would read the whole environment for each message
        self._proxies: dict[str, dict[str, str]] = {}  # by address
        self._verify = ca_file or os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE") or True
        if cert is not None:
            self._session.cert = cert if cert[1] is not None else cert[0]  # type: ignore[assignment] # its stubs know less
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, _Adapter(guarded=guarded))

    def post(self, url: str, body: bytes, headers: Mapping[str, str], timeout: float | None = None) -> HttpResponse:
        """Send, and return the answer, whatever it is; raises ``SendError`` where there is none.

        ``timeout`` in seconds, instead of the usual one.
        """
        return self._exchange("POST", url, body, headers, timeout)

    def ask(self, method: Literal["GET", "HEAD"], url: str, headers: Mapping[str, str]) -> HttpResponse:
        """Ask for what changes nothing; as ``post`` otherwise."""
        return self._exchange(method, url, b"", headers, None)

    def _exchange(
        self, method: str, url: str, body: bytes, headers: Mapping[str, str], timeout: float | None
    ) -> HttpResponse:
        timeout = timeout or self._timeout
        deadline = time.monotonic() + timeout
        if (proxies := self._proxies.get(url)) is None:
            proxies = self._proxies[url] = get_environ_proxies(url)
        try:
            if self._guarded:
                check_target(url, proxied=select_proxy(url, proxies) is not None)
            with self._session.request(
                method,
                url,
                data=body,
                headers={"User-Agent": "notbefore", **headers},
                timeout=(max(timeout / CONNECT_SHARE, min(timeout, SHORTEST_CONNECT)), timeout),
                allow_redirects=False,
                stream=True,
                proxies=proxies,
                verify=self._verify,
            ) as response:
                content = _bounded(response, deadline, self._most)
                return HttpResponse(response.status_code, content, _retry_after(response.headers.get("Retry-After")))
        except PrivateAddressError as error:
            raise SendError(str(error), permanent=not isinstance(error, UnresolvedError)) from None
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            # its text would hold the whole address
            raise SendError(f"{_receiver(url)}: {_reason(error)}") from None

    def close(self) -> None:
        """Close the connections."""
        self._session.close()


def _bounded(response: requests.Response, deadline: float, most: int) -> bytes:
    content = bytearray()
    while chunk := response.raw.read1(4096, decode_content=True):  # what is there, however little it is
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
    if isinstance(seen, (requests.RequestException, urllib3.exceptions.HTTPError)):
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


def _pools(*, guarded: bool) -> dict[str, Any]:
    """The classes of urllib3's pools, with connections of ours."""
    return {
        pool.scheme: type(
            "Pool",
            (pool,),
            {"ConnectionCls": type("Connection", (_ConnectionMixin, pool.ConnectionCls), {"guarded": guarded})},
        )
        for pool in (HTTPConnectionPool, HTTPSConnectionPool)
    }


class _Adapter(HTTPAdapter):
    def __init__(self, *, guarded: bool) -> None:
        self._guarded = guarded
        super().__init__()

    def init_poolmanager(self, *args: Any, **options: Any) -> None:
        super().init_poolmanager(*args, **options)
        self.poolmanager.pool_classes_by_scheme = _pools(guarded=self._guarded)

    def proxy_manager_for(self, *args: Any, **options: Any) -> Any:
        manager = super().proxy_manager_for(*args, **options)
        manager.pool_classes_by_scheme = _pools(guarded=False)  # the proxy's own address may be a private one
        return manager
