"""``AccessControl``: the name in ``Host`` and the password, checked before the application answers."""

import base64
import binascii
import logging
import os
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from notbefore.web.access import Access
from notbefore.web.app import ALWAYS, ANONYMOUS, App, Environ, StartResponse

if TYPE_CHECKING:  # an agent without the file does not import it
    from notbefore.web.web_config import WebConfig

PROBES: Final = ("/healthz", "/readyz")  # they answer without a password, but give no reasons then
REMEMBERED: Final = 16  # passwords that were right
CHALLENGE: Final = ("WWW-Authenticate", 'Basic realm="notbefore", charset="UTF-8"')
BUSY: Final = ("Retry-After", "1")
LONGEST_COMPARISON: Final = 3.0  # seconds; the dearest hash takes one, with its decoys two
LOG_INTERVAL: Final = 60.0  # seconds between two lines about failed logins

log = logging.getLogger("notbefore.http")


class Passwords:
    """Compares passwords with the hashes of the web configuration, one at a time, and remembers the last right ones.

    A hash of cost 10 takes 70 ms of a core. Who comes while one is computed is sent away, unless his password was right
    before: a flood of wrong passwords may delay a first login, and neither a scrape nor a person who has logged in.
    """

    def __init__(self) -> None:
        self._key = os.urandom(32)
        self._right: dict[bytes, None] = {}  # digests under a key of this process
        self._comparing = threading.Lock()

    def check(self, config: "WebConfig", authorization: str) -> bool | None:
        """Whether the header's value is right; ``None``: not compared, since another one is."""
        login = _user_and_password(authorization)
        if login is None:
            return False
        digest = self._digest(config, *login)
        if digest in self._right:
            return True
        if not self._comparing.acquire(blocking=False):
            return None
        try:
            fits = config.password_fits(*login)
            if fits:
                self._right = dict.fromkeys([*list(self._right)[1 - REMEMBERED :], digest])
            return fits
        finally:
            self._comparing.release()

    def close(self) -> None:
        """Compare no more: a thread that is in a hash when the interpreter ends aborts the process."""
        self._comparing.acquire(timeout=LONGEST_COMPARISON)

    def _digest(self, config: "WebConfig", user: str, password: bytes) -> bytes:
        import hashlib  # noqa: PLC0415 - only where there are passwords: it loads OpenSSL

        # with the hash: a password that was changed is not remembered any more
        known = repr((user, password, config.basic_auth_users.get(user))).encode()
        return hashlib.blake2b(known, key=self._key).digest()


def _user_and_password(authorization: str) -> tuple[str, bytes] | None:
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        user, colon, password = base64.b64decode(value.strip(), validate=True).partition(b":")
        return (user.decode("utf-8"), password) if colon else None
    except (binascii.Error, ValueError):
        return None


class LoginFailures:
    """Counts failed logins, and logs them at most once a minute."""

    def __init__(self) -> None:
        self.count = 0
        self._logged = 0  # of them
        self._next = 0.0  # monotonic seconds
        self._lock = threading.Lock()

    def add(self, address: str) -> None:
        """Count one."""
        with self._lock:
            self.count += 1
            if time.monotonic() < self._next:
                return
            new, self._logged = self.count - self._logged, self.count
            self._next = time.monotonic() + LOG_INTERVAL
        log.warning("failed logins: %d, the last from %s", new, address)


class AccessControl:
    """A WSGI application: ``app`` for those who may read, with the headers of the web configuration."""

    def __init__(self, app: App, access: Access) -> None:
        self.passwords = Passwords()
        self.failures = LoginFailures()
        self._app = app
        self._access = access

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Answer a request."""
        config = self._access.config()
        start = start_response if config is None else _with_headers(config, start_response)
        host = environ.get("HTTP_HOST", "")
        if not self._access.accepts_host(host):
            text = f"{host[:100]!r} is not a name of this agent: if it should be, add it to server.allowed_hosts\n"
            return _refuse(environ, start, "421 Misdirected Request", text)
        if config is not None and config.basic_auth_users:
            given = environ.get("HTTP_AUTHORIZATION", "")
            right = self.passwords.check(config, given) if given else False
            if right is None:
                return _refuse(environ, start, "429 Too Many Requests", "another password is being checked\n", BUSY)
            if given and not right:
                self.failures.add(environ.get("REMOTE_ADDR", ""))
            if not given and environ.get("PATH_INFO") in PROBES:
                environ[ANONYMOUS] = True
            elif not right:
                return _refuse(environ, start, "401 Unauthorized", "a user and a password are required\n", CHALLENGE)
        return self._app(environ, start)


def _with_headers(config: "WebConfig", start_response: StartResponse) -> StartResponse:
    extra = dict(config.http_server_config.headers.given())

    def start(status: str, headers: list[tuple[str, str]]) -> object:
        return start_response(status, [pair for pair in headers if pair[0] not in extra] + list(extra.items()))

    return start


def _refuse(environ: Environ, start: Any, status: str, text: str, *headers: tuple[str, str]) -> Iterable[bytes]:
    body = text.encode()
    start(
        status,
        [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body))), *headers, *ALWAYS.items()],
    )
    return () if environ["REQUEST_METHOD"] == "HEAD" else (body,)
