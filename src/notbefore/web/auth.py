"""The gate before the application: whose name is in ``Host``, who gives which password, and the headers of the file."""

import base64
import binascii
import hashlib
import os
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from notbefore.web.access import Access
from notbefore.web.app import ALWAYS, ANONYMOUS, App, Environ, StartResponse

if TYPE_CHECKING:  # without the file, it is not needed
    from notbefore.web.web_config import WebConfig

OPEN_TO_ALL: Final = ("/healthz", "/readyz")  # they answer without a password, but then tell nothing but yes or no
PATIENCE: Final = 2.0  # seconds that a password waits for those before it
WAITING: Final = 2  # passwords that wait at a time; each holds a worker
REMEMBERED: Final = 16  # passwords that were right
CHALLENGE: Final = ("WWW-Authenticate", 'Basic realm="notbefore", charset="UTF-8"')


def guarded(app: App, access: Access) -> App:
    """``app``, for those who may ask."""
    passwords = Passwords()

    def gate(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        config = access.config()
        extra = dict(config.http_server_config.headers.given()) if config is not None else {}

        def start(status: str, headers: list[tuple[str, str]]) -> object:
            return start_response(status, [pair for pair in headers if pair[0] not in extra] + list(extra.items()))

        host = environ.get("HTTP_HOST", "")
        if not access.accepts_host(host):
            text = f"this agent is not known as {host[:100]!r}: if it is its name, add it to server.allowed_hosts\n"
            return _refuse(environ, start, "421 Misdirected Request", text)
        if config is not None and config.basic_auth_users:
            given = environ.get("HTTP_AUTHORIZATION", "")
            if not given and environ.get("PATH_INFO") in OPEN_TO_ALL:
                environ[ANONYMOUS] = True
            else:
                may = passwords.fit(config, given)
                if may is None:
                    return _refuse(environ, start, "503 Service Unavailable", "too many passwords at a time\n")
                if not may:
                    return _refuse(environ, start, "401 Unauthorized", "user and password, please\n", CHALLENGE)
        return app(environ, start)

    return gate


class Passwords:
    """Looks at passwords one at a time, so that wrong ones leave workers to others; a right one is remembered."""

    def __init__(self) -> None:
        self._computing = threading.Lock()
        self._asking = threading.BoundedSemaphore(1 + WAITING)
        self._key = os.urandom(32)
        self._right: dict[bytes, None] = {}  # digests under a key of this process

    def fit(self, config: "WebConfig", given: str) -> bool | None:
        """Whether ``Authorization`` says who may ask; ``None`` if there are too many to look at."""
        login = _login(given)
        if login is None:
            return False
        user, password = login
        known = repr((user, password, config.basic_auth_users.get(user))).encode()
        digest = hashlib.blake2b(known, key=self._key).digest()
        if digest in self._right:
            return True
        if not self._asking.acquire(blocking=False):
            return None
        try:
            if not self._computing.acquire(timeout=PATIENCE):
                return None
            try:
                fits = config.password_fits(user, password)
                if fits:
                    self._remember(digest)
            finally:
                self._computing.release()
        finally:
            self._asking.release()
        return fits

    def _remember(self, digest: bytes) -> None:
        while len(self._right) >= REMEMBERED:
            self._right.pop(next(iter(self._right)))
        self._right[digest] = None


def _login(given: str) -> tuple[str, bytes] | None:
    scheme, _, value = given.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        user, colon, password = base64.b64decode(value.strip(), validate=True).partition(b":")
        return (user.decode("utf-8"), password) if colon else None
    except (binascii.Error, ValueError):
        return None


def _refuse(environ: Environ, start: Any, status: str, text: str, *headers: tuple[str, str]) -> Iterable[bytes]:
    body = text.encode()
    start(
        status,
        [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body))), *headers, *ALWAYS.items()],
    )
    return () if environ["REQUEST_METHOD"] == "HEAD" else (body,)
