"""The gate before the application: whose name is in ``Host``, who gives which password, and the headers of the file."""

import base64
import binascii
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from notbefore.exposition.access import Access
from notbefore.exposition.http import ALWAYS, ANONYMOUS, App, Environ, StartResponse

if TYPE_CHECKING:  # without the file, it is not needed
    from notbefore.exposition.web_config import WebConfig

OPEN_TO_ALL: Final = ("/healthz", "/readyz")  # they answer without a password, but then tell nothing but yes or no
CHALLENGE: Final = ("WWW-Authenticate", 'Basic realm="notbefore", charset="UTF-8"')


def guarded(app: App, access: Access) -> App:
    """``app``, for those who may ask."""

    def gate(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        config = access.config()
        extra = dict(config.http_server_config.headers.given()) if config is not None else {}

        def start(status: str, headers: list[tuple[str, str]]) -> object:
            return start_response(status, [pair for pair in headers if pair[0] not in extra] + list(extra.items()))

        host = environ.get("HTTP_HOST", "")
        if not access.knows_host(host):
            text = f"this agent is not known as {host[:100]!r}: if it is its name, add it to server.allowed_hosts\n"
            return _refuse(environ, start, "421 Misdirected Request", text)
        if config is not None and config.basic_auth_users:
            given = environ.get("HTTP_AUTHORIZATION", "")
            if not given and environ.get("PATH_INFO") in OPEN_TO_ALL:
                environ[ANONYMOUS] = True
            elif not _may(config, given):
                return _refuse(environ, start, "401 Unauthorized", "user and password, please\n", CHALLENGE)
        return app(environ, start)

    return gate


def _may(config: "WebConfig", given: str) -> bool:
    scheme, _, value = given.partition(" ")
    if scheme.lower() != "basic":
        return False
    try:
        user, colon, password = base64.b64decode(value.strip(), validate=True).partition(b":")
        name = user.decode("utf-8")
    except (binascii.Error, ValueError):
        return False
    return bool(colon) and config.password_fits(name, password)


def _refuse(environ: Environ, start: Any, status: str, text: str, *headers: tuple[str, str]) -> Iterable[bytes]:
    body = text.encode()
    start(
        status,
        [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body))), *headers, *ALWAYS.items()],
    )
    return () if environ["REQUEST_METHOD"] == "HEAD" else (body,)
