"""The HTTP interface as a WSGI application: ``/metrics``, ``/healthz``, ``/readyz``, and the paths
of the process.

It is read-only: no request changes anything. Nothing is compressed: that would be most of the work
of a scrape.
"""

import logging
import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec
from msgspec import Struct

from notbefore.core.event_types import EVENT_TYPES, known_name
from notbefore.core.record import HISTORY_RECORDS
from notbefore.core.tracked import PendingView
from notbefore.errors import StoreError
from notbefore.metrics.families import Family

DEFAULT_LIMIT: Final = 100
JSON: Final = "application/json; charset=utf-8"
HTML: Final = "text/html; charset=utf-8"
UNAVAILABLE: Final = "503 Service Unavailable"
COMMON_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
# the page loads only its own files, has nothing inline, and sends nothing anywhere
PAGE_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS: Final = (("Content-Security-Policy", PAGE_POLICY), ("Referrer-Policy", "no-referrer"))
VARY: Final = (("Vary", "Accept"),)
PAGE_FILES: Final = {
    "page.css": "text/css",
    "page.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
ANONYMOUS: Final = "notbefore.anonymous"  # set in the environ of a probe without a password

log = logging.getLogger("notbefore.http")

Environ = dict[str, Any]
StartResponse = Callable[[str, list[tuple[str, str]]], object]
App = Callable[[Environ, StartResponse], Iterable[bytes]]


class CheckResult(Struct, frozen=True):
    """The result of a health check, with its reasons."""

    ok: bool
    reasons: tuple[str, ...] = ()


class Response(Struct, frozen=True):
    """A response before it is sent."""

    body: bytes
    content_type: str = JSON
    status: str = "200 OK"  # as WSGI has it
    headers: tuple[tuple[str, str], ...] = ()


Route = Callable[[Environ], Response]


class BadRequestError(Exception):
    """The query is wrong; the text says what was expected."""


def rendered(families: Iterable[Family], accept: str) -> tuple[bytes, str]:
    """Return the text of the families and its content type, as an ``Accept`` header asks."""
    from notbefore.web.exposition import render  # 8 MiB, at the first scrape

    return render(families, accept)


def application(
    metrics: Callable[[str], tuple[bytes, str]],
    health: Callable[[], CheckResult],
    ready: Callable[[Environ], CheckResult],
    more: dict[str, Route],
) -> App:
    """Return the application with the paths of every process and those of ``more``.

    ``metrics``: the ``Accept`` header -> body and content type. ``health``: is the process alive?
    ``ready``: does it receive the data that it watches? They are called from several threads; none
    may wait for the network.
    """

    def answer_metrics(environ: Environ) -> Response:
        body, content_type = metrics(environ.get("HTTP_ACCEPT", ""))
        return Response(body, content_type, headers=VARY)

    def answer_health(environ: Environ) -> Response:
        return _check(health(), "unhealthy", environ)

    def answer_ready(environ: Environ) -> Response:
        return _check(ready(environ), "not ready", environ)

    routes: dict[str, Route] = {
        "/metrics": answer_metrics,
        "/healthz": answer_health,
        "/readyz": answer_ready,
    }
    for name in PAGE_FILES:
        routes[f"/page/{name}"] = partial(_page_file, name)
    routes |= more

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        return send(_respond(routes, environ), environ, start_response)

    return app


def send(response: Response, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
    """Send a response through the WSGI server."""
    headers = {
        "Content-Type": response.content_type,
        "Content-Length": str(len(response.body)),
        **COMMON_HEADERS,
        **dict(response.headers),
    }
    start_response(response.status, list(headers.items()))
    if environ["REQUEST_METHOD"] == "HEAD":
        return ()
    return (response.body,)


def path_of(environ: Environ) -> str:
    """Return the path exactly as it was sent.

    So ``//metrics`` and ``/%6detrics`` are not ``/metrics``.
    """
    uri: str = environ["REQUEST_URI"]
    return uri.partition("?")[0]


def _respond(routes: dict[str, Route], environ: Environ) -> Response:
    route = routes.get(path_of(environ))
    if route is None:
        return error("404 Not Found", f"not found; the paths are {', '.join(routes)}")
    if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
        return error("405 Method Not Allowed", "only GET and HEAD", ("Allow", "GET, HEAD"))
    try:
        return route(environ)
    except BadRequestError as bad_request:
        return error("400 Bad Request", str(bad_request))
    except StoreError as unreadable:
        return error(UNAVAILABLE, str(unreadable))
    except Exception:  # a failure must not end the worker
        log.exception("%s failed", path_of(environ))
        return error("500 Internal Server Error", "internal error; the agent's log says why")


def error(status: str, text: str, *headers: tuple[str, str]) -> Response:
    """Return a response that says why the request is refused."""
    return Response(msgspec.json.encode({"error": text}), status=status, headers=headers)


def html(body: bytes) -> Response:
    """Return a response with an HTML page."""
    return Response(body, HTML, headers=PAGE_HEADERS)


def _page_file(name: str, _environ: Environ) -> Response:
    file = Path(__file__).with_name("page") / name
    return Response(file.read_bytes(), f"{PAGE_FILES[name]}; charset=utf-8")


def _check(result: CheckResult, failure: str, environ: Environ) -> Response:
    """Return the response for a health check; ``failure``: its status if the check fails."""
    reasons = result.reasons
    if environ.get(ANONYMOUS):
        reasons = ()  # they may contain paths and addresses
    if result.ok:
        return Response(msgspec.json.encode({"status": "ok", "reasons": reasons}))
    body = msgspec.json.encode({"status": failure, "reasons": reasons})
    return Response(body, status=UNAVAILABLE)


def readiness(
    ready: CheckResult, events: Callable[[], PendingView], environ: Environ
) -> CheckResult:
    """Whether it is ready and, with ``pending=Reboot,Redeploy``, no event of these types is listed
    for this VM.

    An event of unknown scope counts as this VM's, and an unreadable event counts as one of these
    types.
    """
    query = query_of(environ, "pending")
    if not query:
        return ready
    types = {known_name(name.strip()) for name in ",".join(query["pending"]).split(",")}
    for name in types.difference(EVENT_TYPES):
        raise BadRequestError(
            f"pending: expected a list of {', '.join(EVENT_TYPES)}, got {name[:40]!r}"
        )
    pending = events()
    reasons = list(ready.reasons)
    for event in pending.events:
        if event.scope != "peer" and event.event_type in types:
            status = event.event_status.lower()
            reasons.append(f"{event.event_type} {event.event_id} of this VM is {status}")

    has_listed = len(reasons) > len(ready.reasons)
    ok = ready.ok and not has_listed and not pending.unreadable
    return CheckResult(ok, tuple(reasons))


def query_of(environ: Environ, *fields: str) -> dict[str, list[str]]:
    """Return the fields of the query; raises ``BadRequestError`` for any other field."""
    query = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
    for name in query:
        if name not in fields:
            raise BadRequestError(f"{name[:40]!r}: expected {' or '.join(fields)}")
    return query


def history_query(environ: Environ) -> tuple[datetime | None, int]:
    """Return the earliest time and the number of changes that a query for the history asks for."""
    query = query_of(environ, "limit", "since")
    return since_of(query), _limit_of(query)


def _limit_of(query: dict[str, list[str]]) -> int:
    *_, text = query.get("limit", [str(DEFAULT_LIMIT)])
    # `int` would take other digits and blanks too, and a long number for a long time
    if re.fullmatch(r"\d{1,9}", text, re.ASCII) and 1 <= int(text) <= HISTORY_RECORDS:
        return int(text)
    expected = f"a number from 1 to {HISTORY_RECORDS}"
    raise BadRequestError(f"limit: expected {expected}, got {text[:40]!r}")


def since_of(query: dict[str, list[str]]) -> datetime | None:
    """Return the time in the query's ``since``; ``None`` without one."""
    *_, text = query.get("since", [""])
    if not text:
        return None
    try:
        if text.replace(".", "", 1).isdigit():
            return datetime.fromtimestamp(float(text), UTC)
        # a plus that was not encoded arrives as a space
        time = datetime.fromisoformat(text.replace(" ", "+"))
    except (ValueError, OverflowError, OSError):
        raise BadRequestError(
            f"since: expected RFC 3339 or Unix seconds, got {text[:40]!r}"
        ) from None
    if time.tzinfo is None:
        return time.replace(tzinfo=UTC)
    return time
