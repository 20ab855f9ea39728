"""``Pings``: a dead man's switch. While the agent polls well, somebody hears of it at each interval.

A thread of the agent, with the standard library's HTTP client, which the agent has loaded anyway: a courier would be
started for each ping, and would stay. Nothing is kept or tried again: the next ping says it as well.
"""

import logging
import os
import ssl
import threading
import urllib.request
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from msgspec import Struct

from notbefore import __version__
from notbefore.agent.unforeseen import UnforeseenErrors
from notbefore.config.model import Config
from notbefore.config.sinks import OtlpConnection, Webhook
from notbefore.core.delivery import heartbeat_delivery
from notbefore.core.record import Heartbeat, Value, Vm, is_of_resource, json_line
from notbefore.courier.addresses import PrivateAddressError, check_address, check_target
from notbefore.courier.head_deadline import HeadDeadlineMixin
from notbefore.courier.message import Message
from notbefore.courier.sinks.webhook import WebhookRequest
from notbefore.errors import ConfigError

FIRST: Final = 3.0  # seconds to the first ping: by then IMDS has usually said who this VM is
PING_TIMEOUT: Final = 10.0  # seconds, for ``ping_url``
STOP_PATIENCE: Final = 0.5  # seconds for the thread to end

log = logging.getLogger("notbefore.agent.pings")


class PingStatus(Struct, frozen=True):
    """What a ping says."""

    ok: bool  # IMDS was polled well, and the state is written
    line: str  # in words
    vm: Vm | None
    listed: tuple[str, ...]  # EventIds
    now: datetime


class Post(Struct, frozen=True):
    """One request."""

    url: str
    body: bytes
    headers: Mapping[str, str]
    timeout: float  # seconds
    ca_file: str | None = None
    cert: tuple[str, str | None] | None = None
    guarded: bool = False  # to public addresses alone


class Pings:
    """``status`` and ``config`` are asked at each ping, in the thread ``pings``, which runs only where it is wanted.

    ``status`` returns ``None`` while there is nothing to say yet.
    """

    def __init__(
        self, status: Callable[[], PingStatus | None], config: Callable[[], Config], errors: UnforeseenErrors
    ) -> None:
        self._status = status
        self._config = config
        self._errors = errors
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._changed = threading.Event()
        self._contexts: dict[tuple[Any, ...], ssl.SSLContext] = {}  # each holds all CAs: 1 MiB, and 15 ms to make
        self._failing: dict[str, str] = {}  # whom a ping did not reach -> why

    def reconfigure(self) -> None:
        """Start, keep or stop the thread, as the configuration says."""
        self._changed.set()
        if self._thread is None and self._config().heartbeat is not None:
            self._thread = threading.Thread(target=self._run, name="pings", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._changed.set()
        if self._thread is not None:
            self._thread.join(STOP_PATIENCE)

    def _run(self) -> None:
        self._changed.clear()
        self._stop.wait(FIRST)
        while not self._stop.is_set():
            heartbeat = self._config().heartbeat
            if heartbeat is not None:
                with self._errors.guarded("pings", vital=False):
                    self._ping(heartbeat.every.seconds)
            self._changed.wait(heartbeat.every.seconds if heartbeat is not None else None)
            self._changed.clear()

    def _ping(self, every: float) -> None:
        config, status = self._config(), self._status()
        heartbeat = config.heartbeat
        if heartbeat is None or status is None:  # a reload was faster, or it is too early to say anything
            return
        if heartbeat.ping_url is not None:
            url = heartbeat.ping_url
            self._post("ping_url", lambda: ping(url.reveal(), status))
        settings = config.sinks[heartbeat.sink].settings if heartbeat.sink is not None else None
        if not status.ok or status.vm is None:
            return
        record = Heartbeat.of(status.vm, status.listed, __version__, status.now, every)
        if isinstance(settings, Webhook):
            self._post(f"sink {heartbeat.sink}", lambda: to_webhook(settings, heartbeat.sink or "", record, every))
        elif isinstance(settings, OtlpConnection):
            self._post(f"sink {heartbeat.sink}", lambda: to_otlp(settings, record))

    def _post(self, whom: str, made: Callable[[], Post]) -> None:
        """Send it, and log once why it does not arrive, and that it does again."""
        try:
            why = self._sent(made())
        except ConfigError as error:  # a secret that cannot be read
            why = str(error)
        except ValueError:  # its text may show the address
            why = "this is not an address"
        before = self._failing.pop(whom, "")
        if why:
            self._failing[whom] = why
            self._contexts.clear()  # a certificate may have been renewed
        if why and why != before:
            log.warning("heartbeat: %s was not reached: %s", whom, why)
        elif before and not why:
            log.info("heartbeat: %s is reached again", whom)

    def _sent(self, post: Post) -> str:
        """Send it, follow no redirect; returns why it was not accepted, without the address; empty if it was."""
        parts = urlsplit(post.url)
        host = parts.hostname or ""
        proxies = {} if urllib.request.proxy_bypass(host) else urllib.request.getproxies()
        try:
            if post.guarded:
                check_target(post.url, proxied=parts.scheme in proxies)
            opener = urllib.request.OpenerDirector()
            opener.add_handler(urllib.request.ProxyHandler(proxies))
            guarded = post.guarded and parts.scheme not in proxies
            opener.add_handler(_Http(guarded=guarded))
            if parts.scheme == "https":
                opener.add_handler(_Https(self._context(post), guarded=guarded))
            request = urllib.request.Request(post.url, post.body, {"User-Agent": "notbefore", **post.headers})  # noqa: S310 - http and https have handlers, nothing else
            with opener.open(request, timeout=post.timeout) as answer:
                return "" if answer.status // 100 == 2 else f"{host} answers {answer.status}"  # noqa: PLR2004 - 2xx
        except (OSError, PrivateAddressError) as error:
            reason = getattr(error, "reason", None)  # of a URLError
            return f"{host}: {reason if isinstance(reason, Exception) else error}"
        except HTTPException as error:  # its text may show the path
            return f"{host}: {type(error).__name__}"

    def _context(self, post: Post) -> ssl.SSLContext:
        key = (post.ca_file, post.cert)
        if key not in self._contexts:
            self._contexts[key] = _context(post)
        return self._contexts[key]


def ping(url: str, status: PingStatus) -> Post:
    """Success, or ``/fail`` behind the path, with the state as text; as healthchecks.io and others take it."""
    parts = urlsplit(url)
    if not status.ok:
        parts = parts._replace(path=parts.path.rstrip("/") + "/fail")
    name = status.vm.name if status.vm is not None else "unknown VM"
    body = f"notbefore {__version__} on {name}: {status.line}\n".encode()
    return Post(urlunsplit(parts), body, {"Content-Type": "text/plain; charset=utf-8"}, PING_TIMEOUT)


def to_webhook(settings: Webhook, sink: str, record: Heartbeat, every: float) -> Post:
    """The heartbeat, as the sink would send it."""
    delivery = heartbeat_delivery(sink, record.vm_name or "", record.line(), record.time.timestamp(), every)
    body, headers = WebhookRequest(settings).of(Message.of(delivery))
    return Post(
        settings.url.reveal(),
        body,
        headers,
        settings.timeout.seconds,
        settings.ca_file,
        (settings.cert_file, settings.key_file) if settings.cert_file else None,
        guarded=not settings.allow_private,
    )


def to_otlp(settings: OtlpConnection, record: Heartbeat) -> Post:
    """The heartbeat as a log record, OTLP over HTTP in JSON: OpenTelemetry's SDK would cost the agent 13 MiB."""
    flat = record.flat()
    own = {"service.name": "notbefore", "service.version": __version__, **settings.resource}
    resource = own | {name: value for name, value in flat.items() if is_of_resource(name)}
    rest = {name: value for name, value in flat.items() if not is_of_resource(name) and name not in ("time", "body")}
    log_record = {
        "timeUnixNano": str(int(record.time.timestamp() * 1e9)),
        "severityNumber": 9,
        "severityText": "INFO",
        "eventName": record.event_name,
        "body": {"stringValue": record.body},
        "attributes": [_attribute(name, value) for name, value in rest.items()],
    }
    scope = {"scope": {"name": "notbefore", "version": __version__}, "logRecords": [log_record]}
    attributes = [_attribute(name, value) for name, value in resource.items()]
    body = json_line({"resourceLogs": [{"resource": {"attributes": attributes}, "scopeLogs": [scope]}]})
    headers = {name: value.reveal() for name, value in settings.headers.items()}
    return Post(
        settings.logs_endpoint or f"{(settings.endpoint or '').rstrip('/')}/v1/logs",
        body,
        headers | {"Content-Type": "application/json"},
        settings.timeout.seconds,
        settings.ca_file,
        (settings.cert_file, settings.key_file) if settings.cert_file else None,
    )


def _attribute(name: str, value: Value) -> dict[str, Any]:
    return {"key": name, "value": _value(value)}


def _value(value: Value) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_value(one) for one in value]}}
    return {"stringValue": value}


def _context(post: Post) -> ssl.SSLContext:
    """As the sinks do it: the CA that is configured, that of the environment, or those that certifi knows."""
    import certifi  # noqa: PLC0415 - only where somebody is pinged

    variables = (os.environ.get(name) for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"))
    context = ssl.create_default_context(cafile=post.ca_file or next(filter(None, variables), None) or certifi.where())
    if post.cert is not None:
        context.load_cert_chain(*post.cert)
    return context


class _GuardedConnection(HeadDeadlineMixin, HTTPConnection):
    """``guarded``: to public addresses alone."""

    def __init__(self, *values: Any, guarded: bool, **options: Any) -> None:
        super().__init__(*values, **options)
        self._guarded = guarded

    def connect(self) -> None:
        super().connect()
        if self._guarded:  # before a byte is sent
            check_address(self.sock.getpeername()[0])


class _TlsConnection(_GuardedConnection, HTTPSConnection):
    pass


class _Http(urllib.request.HTTPHandler):
    def __init__(self, *, guarded: bool) -> None:
        super().__init__()
        self._guarded = guarded

    def http_open(self, req: urllib.request.Request) -> HTTPResponse:
        return self.do_open(partial(_GuardedConnection, guarded=self._guarded), req)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, context: ssl.SSLContext, *, guarded: bool) -> None:
        super().__init__(context=context)
        self._tls, self._guarded = context, guarded

    def https_open(self, req: urllib.request.Request) -> HTTPResponse:
        return self.do_open(partial(_TlsConnection, guarded=self._guarded), req, context=self._tls)
