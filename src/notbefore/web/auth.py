"""``AccessControl``: the name in ``Host`` and the password, checked before the application answers."""

import base64
import logging
import os
import threading
from collections.abc import Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from notbefore.web.access import Access
from notbefore.web.app import ANONYMOUS, App, Environ, Response, StartResponse, path_of, send

if TYPE_CHECKING:  # an agent without the file does not import it
    from notbefore.web.web_config import WebConfig

PROBES: Final = ("/healthz", "/readyz")  # they answer without a password, but give no reasons then
REMEMBERED: Final = 16  # passwords that were right
CHALLENGE: Final = ("WWW-Authenticate", 'Basic realm="notbefore", charset="UTF-8"')
BUSY: Final = ("Retry-After", "1")
LONGEST_COMPARISON: Final = 2.0  # seconds; the dearest hash takes one

log = logging.getLogger("notbefore.http")


class AccessControl:
    """A WSGI application: ``app`` for those who may read.

    Passwords are compared with the hashes of the web configuration one at a time, and the last right ones are
    remembered. A hash of cost 10 takes 70 ms of a core. Who comes while one is computed is sent away, unless his
    password was right before: a flood of wrong passwords may delay a first login, and neither a scrape nor a person
    who has logged in.
    """

    def __init__(self, app: App, access: Access) -> None:
        self.failures = 0  # logins with a wrong user or password
        self._app = app
        self._access = access
        self._key = os.urandom(32)
        self._right: list[bytes] = []  # digests under a key of this process
        self._comparing = threading.Lock()

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Answer a request."""
        refused = self._refusal(environ)
        return self._app(environ, start_response) if refused is None else send(refused, environ, start_response)

    def close(self) -> None:
        """Compare no more: a thread that is in a hash when the interpreter ends aborts the process."""
        self._comparing.acquire(timeout=LONGEST_COMPARISON)

    def _refusal(self, environ: Environ) -> Response | None:
        config, host = self._access.config(), environ.get("HTTP_HOST", "")
        if not self._access.accepts_host(host):
            text = f"{host[:100]!r} is not a name of this agent: if it should be, add it to server.allowed_hosts"
            return _text(HTTPStatus.MISDIRECTED_REQUEST, text)
        if config is None or not config.basic_auth_users:
            return None
        given = environ.get("HTTP_AUTHORIZATION", "")
        if not given and path_of(environ) in PROBES:
            environ[ANONYMOUS] = True
            return None
        right = self._check(config, given, environ.get("REMOTE_ADDR", "")) if given else False
        if right is None:
            return _text(HTTPStatus.TOO_MANY_REQUESTS, "another password is being checked", BUSY)
        return None if right else _text(HTTPStatus.UNAUTHORIZED, "a user and a password are required", CHALLENGE)

    def _check(self, config: "WebConfig", authorization: str, address: str) -> bool | None:
        """Whether the header's value is right; ``None``: not compared, since another one is."""
        import hashlib  # noqa: PLC0415 - only where there are passwords: it loads OpenSSL

        login = _user_and_password(authorization)
        # with the hash: a password that was changed is not remembered any more
        known = repr((login, config.basic_auth_users.get(login[0]) if login else None)).encode()
        digest = hashlib.blake2b(known, key=self._key).digest()
        if digest in self._right:
            return True
        if not self._comparing.acquire(blocking=False):
            return None if login else False
        try:
            if login and config.password_fits(*login):
                self._right = [*self._right[1 - REMEMBERED :], digest]
                return True
            self.failures += 1
        finally:
            self._comparing.release()
        log.debug("a failed login from %s", address)
        return False


def _user_and_password(authorization: str) -> tuple[str, bytes] | None:
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        user, colon, password = base64.b64decode(value.strip(), validate=True).partition(b":")
        return (user.decode("utf-8"), password) if colon else None
    except ValueError:
        return None


def _text(status: HTTPStatus, text: str, *headers: tuple[str, str]) -> Response:
    return Response(f"{text}\n".encode(), "text/plain; charset=utf-8", status, headers)
