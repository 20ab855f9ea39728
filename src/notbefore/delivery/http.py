"""``Http``: one POST as all sinks need it: no redirects, bounded answers, failures that say whether to come again.

Proxies and CA bundles are taken from the environment (``HTTPS_PROXY``, ``NO_PROXY``, ``REQUESTS_CA_BUNDLE``), as
requests does it; a ``.netrc`` is not.
"""

import ipaddress
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPException
from typing import Any, ClassVar, Final
from urllib.parse import urlsplit

import requests
import urllib3
from msgspec import Struct
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import ConnectTimeoutError, NewConnectionError
from urllib3.util import Retry
from urllib3.util.connection import allowed_gai_family

from notbefore.delivery.retry import outcome_of_status
from notbefore.errors import SendError

MAX_ANSWER: Final = 64 * 1024  # bytes of an answer that are looked at
LONGEST_HEAD: Final = 300.0  # seconds for the head of an answer, where no timeout says less
MAX_CAUSE: Final = 200  # characters of an answer that are told as the cause of a failure
WIRE_SERVER: Final = ipaddress.ip_address("168.63.129.16")  # the host's agent channel in Azure: as private as IMDS


class HttpResponse(Struct, frozen=True):
    """What the far side said, whatever its status."""

    status: int
    body: bytes
    retry_after: float | None = None  # seconds

    @property
    def cause(self) -> str:
        """Status and the beginning of the body, for an error's text."""
        text = " ".join(self.body.decode(errors="replace").split())[:MAX_CAUSE]
        return f"{self.status}: {text}" if text else str(self.status)

    def check(self) -> None:
        """Raise ``SendError`` unless the status is 2xx."""
        outcome = outcome_of_status(self.status, self.retry_after)
        if not outcome.accepted:
            raise SendError(self.cause, permanent=outcome.permanent, retry_after=outcome.retry_after)


class PrivateAddressError(Exception):
    """The connection leads where it may not lead."""


class Http:
    """Connections that are kept for the next message. ``guarded``: to public addresses alone.

    ``most``: bytes of an answer that are read.
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
        self._most = most
        self._guarded = guarded
        self._session = requests.Session()
        self._session.auth = lambda request: request  # else requests takes passwords from a .netrc
        self._ca_file = ca_file
        if cert is not None:
            self._session.cert = cert if cert[1] is not None else cert[0]  # type: ignore[assignment] # its stubs know less
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, _GuardedAdapter() if guarded else _TimedAdapter())

    def post(self, url: str, body: bytes, headers: Mapping[str, str], timeout: float | None = None) -> HttpResponse:
        """Send and return the answer, whatever it is; raises ``SendError`` where there is none."""
        timeout = timeout or self._timeout
        deadline = time.monotonic() + timeout
        host = urlsplit(url).hostname or ""
        if self._guarded:
            _refuse_literal(host)
        try:
            with self._session.post(
                url,
                data=body,
                headers={"User-Agent": "notbefore", **headers},
                timeout=timeout,
                allow_redirects=False,
                stream=True,
                verify=self._ca_file,  # None: what the environment says, or the bundle of certifi
            ) as response:
                content = _bounded(response, deadline, self._most)
                return HttpResponse(response.status_code, content, _retry_after(response.headers.get("Retry-After")))
        except PrivateAddressError as error:
            raise SendError(str(error), permanent=True) from None
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            # its text would hold the whole address
            raise SendError(f"{host}: {_reason(error)}") from None

    def close(self) -> None:
        """Let go of the connections."""
        self._session.close()


def _bounded(response: requests.Response, deadline: float, most: int) -> bytes:
    content = bytearray()
    while chunk := response.raw.read1(4096, decode_content=True):  # what is there, however little it is
        content += chunk
        if len(content) > most:
            return bytes(content[:most])  # the status counts; nobody needs the rest
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


def _reason(error: BaseException) -> str:
    """The innermost reason that says something: ``ConnectionRefusedError: [Errno 111] Connection refused``."""
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
    return f"{type(seen).__name__}: {seen}"


# ---- an end to every answer


class _Timed:
    """What has an end as a whole: the attempts to connect, and the head of an answer.

    A timeout would be for each address of a name, and for the next bytes of a head.
    """

    sock: socket.socket | None
    port: int
    timeout: Any
    _dns_host: str

    def _new_conn(self) -> socket.socket:
        """Try the addresses in turn, each with its share of the time that is left."""
        name, timeout = self._dns_host, self.timeout
        deadline = time.monotonic() + timeout
        addresses = _addresses(name, self.port)
        try:
            for left in range(len(addresses), 0, -1):
                self._dns_host, self.timeout = addresses[-left], max(0.001, deadline - time.monotonic()) / left
                try:
                    sock: socket.socket = super()._new_conn()  # type: ignore[misc] # of the class beside it
                except (ConnectTimeoutError, NewConnectionError):
                    if left == 1:
                        raise
                else:
                    sock.settimeout(timeout)
                    return sock
        finally:
            self._dns_host, self.timeout = name, timeout
        raise AssertionError  # there is one address at least

    def getresponse(self) -> Any:
        sock, late = self.sock, threading.Event()

        def cut() -> None:
            late.set()
            with suppress(OSError, AttributeError):  # it has ended after all
                sock.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr] # as above

        timer = threading.Timer((sock.gettimeout() if sock is not None else None) or LONGEST_HEAD, cut)
        timer.daemon = True
        timer.start()
        response = None
        try:
            response = super().getresponse()  # type: ignore[misc] # of the class beside it
        except (OSError, HTTPException):
            if not late.is_set():
                raise
        finally:
            timer.cancel()
        if late.is_set():  # what was cut off looks like a head that has ended, or a far side that hung up
            raise TimeoutError("no answer in time")
        return response


def _addresses(name: str, port: int) -> list[str]:
    """Where a name leads, each address once; the name itself where that is not known: who connects says why."""
    try:
        found = socket.getaddrinfo(name.strip("[]"), port, allowed_gai_family(), socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return [name]
    return list(dict.fromkeys(str(info[4][0]) for info in found)) or [name]


class _TimedHTTPConnection(_Timed, HTTPConnection):
    pass


class _TimedHTTPSConnection(_Timed, HTTPSConnection):
    pass


class _TimedHTTPPool(HTTPConnectionPool):
    ConnectionCls = _TimedHTTPConnection


class _TimedHTTPSPool(HTTPSConnectionPool):
    ConnectionCls = _TimedHTTPSConnection


class _TimedAdapter(HTTPAdapter):
    POOLS: ClassVar[dict[str, Any]] = {"http": _TimedHTTPPool, "https": _TimedHTTPSPool}

    def init_poolmanager(self, *args: Any, **options: Any) -> None:
        super().init_poolmanager(*args, **options)
        self.poolmanager.pool_classes_by_scheme = self.POOLS

    def proxy_manager_for(self, *args: Any, **options: Any) -> Any:
        manager = super().proxy_manager_for(*args, **options)
        # the proxy's address may be a private one: there is only an end to wait for
        manager.pool_classes_by_scheme = _TimedAdapter.POOLS
        return manager


# ---- public addresses alone


def _refuse(address: str) -> None:
    ip = ipaddress.ip_address(address.partition("%")[0])
    ip = getattr(ip, "ipv4_mapped", None) or ip
    if not ip.is_global or ip == WIRE_SERVER:
        raise PrivateAddressError(f"{ip} is no public address: set `allow_private: true` if that is where it shall go")


def _refuse_literal(host: str) -> None:
    """For connections through a proxy, which resolves the name itself: what is clear from the name."""
    try:
        if host == "localhost" or host.endswith(".localhost"):
            host = "127.0.0.1"
        _refuse(host)
    except PrivateAddressError as error:
        raise SendError(str(error), permanent=True) from None
    except ValueError:
        return  # a name


class _Guarded:
    """Looks at the address that was really connected to, before a byte is sent: a name may change its mind."""

    def _new_conn(self) -> socket.socket:
        sock: socket.socket = super()._new_conn()  # type: ignore[misc] # of the class beside it
        try:
            _refuse(sock.getpeername()[0])
        except BaseException:
            sock.close()
            raise
        return sock


class _GuardedHTTPConnection(_Guarded, _TimedHTTPConnection):
    pass


class _GuardedHTTPSConnection(_Guarded, _TimedHTTPSConnection):
    pass


class _GuardedHTTPPool(HTTPConnectionPool):
    ConnectionCls = _GuardedHTTPConnection


class _GuardedHTTPSPool(HTTPSConnectionPool):
    ConnectionCls = _GuardedHTTPSConnection


class _GuardedAdapter(_TimedAdapter):
    POOLS: ClassVar[dict[str, Any]] = {"http": _GuardedHTTPPool, "https": _GuardedHTTPSPool}
