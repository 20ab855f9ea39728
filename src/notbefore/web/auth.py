"""``AccessControl``: the name in ``Host`` and the password, checked before the application answers."""

import base64
import binascii
import os
from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from notbefore.web.access import Access
from notbefore.web.app import ALWAYS, ANONYMOUS, App, Environ, StartResponse

if TYPE_CHECKING:  # an agent without the file does not import it
    from notbefore.web.web_config import WebConfig

LOGIN: Final = "notbefore.login"  # of the environ: a ``Login``
PROBES: Final = ("/healthz", "/readyz")  # they answer without a password, but give no reasons then
REMEMBERED: Final = 16  # passwords that were right
RETRY_AFTER: Final = 10  # seconds; sent to a client whose password was not checked
CHALLENGE: Final = ("WWW-Authenticate", 'Basic realm="notbefore", charset="UTF-8"')


class Login(Enum):
    """What is known of the user and password of a request."""

    MISSING = "missing"  # none was given
    UNCHECKED = "unchecked"  # to be compared with the hash, which takes a while
    RIGHT = "right"
    WRONG = "wrong"
    REFUSED = "refused"  # not checked: too many others are waiting


class Passwords:
    """Compares passwords with the hashes of the web configuration, and remembers the last right ones.

    ``check`` is for one thread at a time; ``recall`` never waits.
    """

    def __init__(self) -> None:
        self._key = os.urandom(32)
        self._right: dict[bytes, None] = {}  # digests under a key of this process

    def recall(self, config: "WebConfig", authorization: str) -> Login:
        """What can be said without computing a hash. ``authorization``: the header's value."""
        if not authorization:
            return Login.MISSING
        login = _user_and_password(authorization)
        if login is None:
            return Login.WRONG
        return Login.RIGHT if self._digest(config, *login) in self._right else Login.UNCHECKED

    def check(self, config: "WebConfig", authorization: str) -> Login:
        """``RIGHT`` or ``WRONG``, by the hash: 70 ms for a hash of cost 10."""
        login = _user_and_password(authorization)
        if login is None or not config.password_fits(*login):
            return Login.WRONG
        while len(self._right) >= REMEMBERED:
            self._right.pop(next(iter(self._right)))
        self._right[self._digest(config, *login)] = None
        return Login.RIGHT

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


class AccessControl:
    """A WSGI application: ``app`` for those who may read, with the headers of the web configuration."""

    def __init__(self, app: App, access: Access) -> None:
        self._app = app
        self._access = access

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Answer a request."""
        config = self._access.config()
        extra = dict(config.http_server_config.headers.given()) if config is not None else {}

        def start(status: str, headers: list[tuple[str, str]]) -> object:
            return start_response(status, [pair for pair in headers if pair[0] not in extra] + list(extra.items()))

        host = environ.get("HTTP_HOST", "")
        if not self._access.accepts_host(host):
            text = f"{host[:100]!r} is not a name of this agent: if it should be, add it to server.allowed_hosts\n"
            return _refuse(environ, start, "421 Misdirected Request", text)
        if config is not None and config.basic_auth_users:
            login = environ.get(LOGIN)
            if login is Login.MISSING and environ.get("PATH_INFO") in PROBES:
                environ[ANONYMOUS] = True
            elif login is Login.REFUSED:
                retry = ("Retry-After", str(RETRY_AFTER))
                return _refuse(environ, start, "429 Too Many Requests", "too many logins are waiting\n", retry)
            elif login is not Login.RIGHT:
                return _refuse(environ, start, "401 Unauthorized", "a user and a password are required\n", CHALLENGE)
        return self._app(environ, start)


def _refuse(environ: Environ, start: Any, status: str, text: str, *headers: tuple[str, str]) -> Iterable[bytes]:
    body = text.encode()
    start(
        status,
        [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body))), *headers, *ALWAYS.items()],
    )
    return () if environ["REQUEST_METHOD"] == "HEAD" else (body,)
