"""The contract of sinks, and the failures of those that speak HTTP, for each built-in sink."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from google.protobuf.json_format import MessageToJson

from notbefore.config.secret import Secret, secrets_in
from notbefore.config.sinks import (
    KINDS,
    Alertmanager,
    Apprise,
    Command,
    Email,
    EventHub,
    Kubernetes,
    OtlpConnection,
    PagerDuty,
    SinkConfig,
    Slack,
    Webhook,
    WindowsEventLog,
)
from notbefore.core.duration import Duration
from notbefore.courier.sink import Sink
from notbefore.errors import SendError
from notbefore.testing import SECRET, Receiver, SinkContract
from peers import kubernetes
from peers.event_log import EventLog
from peers.otlp import decoded
from support.hub import Hub
from support.messages import message, sink_of
from support.peers import Answer, HttpPeer, MailPeer

CANARY = SECRET
TIMEOUT = Duration("60s")  # enough for a receiver on a busy machine


class BuiltInReceiver(Receiver):
    """The receiver of a built-in sink, which the courier would make from a configuration."""

    config: SinkConfig
    down: SinkConfig

    @property
    def secrets(self) -> Sequence[str]:
        return [secret.reveal() for secret in secrets_in(self.config.settings).values()]

    def sink(self) -> Sink:
        return sink_of(self.config)

    def unreachable_sink(self) -> Sink:
        return sink_of(self.down)


class HttpReceiver(BuiltInReceiver):
    peer_class = HttpPeer

    def __init__(self, make: Callable[[str], SinkConfig], stack: ExitStack) -> None:
        self.peer = stack.enter_context(self.peer_class())
        self.config = make(self.peer.url)
        self.down = make("http://127.0.0.1:9")

    def fail(self) -> None:
        self.peer.default = Answer(503)

    def refuse(self) -> None:
        self.peer.default = Answer(400)

    def received(self) -> list[bytes]:
        return [request.body for request in self.peer.requests]


class AcceptingSlack(HttpPeer):
    """Accepts every call of the Web API, whatever its token and content."""

    def answer(self, handler: BaseHTTPRequestHandler, answer: Answer) -> None:
        if answer == Answer():
            answer = Answer(body=b'{"ok": true, "channel": "C0", "ts": "1.000001"}')
        super().answer(handler, answer)


class SlackBotReceiver(HttpReceiver):
    """A message that opens a thread is followed by its reply: together they are one step."""

    peer_class = AcceptingSlack

    def received(self) -> list[bytes]:
        bodies = super().received()
        steps = bodies[:]
        for opening, reply in pairwise(bodies):
            if b"thread_ts" in reply and b"thread_ts" not in opening:
                steps.remove(opening)
        return steps


class OtlpReceiver(HttpReceiver):
    """Its bodies are protobuf, which the tests read as JSON."""

    def received(self) -> list[bytes]:
        return [MessageToJson(decoded(request)).encode() for request in self.peer.requests]


class MailReceiver(BuiltInReceiver):
    def __init__(self, stack: ExitStack) -> None:
        self.peer = stack.enter_context(MailPeer())
        self.config = self._config(self.peer.port)
        self.down = self._config(9)

    @staticmethod
    def _config(port: int) -> SinkConfig:
        sender = f"{CANARY}@example.org"
        return SinkConfig(
            email=Email(
                host="127.0.0.1",
                port=port,
                tls="none",
                sender=sender,
                to=("ops@example.org",),
                timeout=TIMEOUT,
            )
        )

    def fail(self) -> None:
        self.peer.replies.append("451 come again")

    def refuse(self) -> None:
        self.peer.replies.append("554 never")

    def received(self) -> list[bytes]:
        return [content for _, content in self.peer.mails]


class CommandReceiver(BuiltInReceiver):
    def __init__(self, directory: Path) -> None:
        self.out = directory / "out"
        self.code = directory / "code"
        script = directory / "script.py"
        script.write_text(
            f"import sys; open({str(self.out)!r}, 'a').write(sys.stdin.read())\n"
            f"sys.exit(int(open({str(self.code)!r}).read()))\n",
            encoding="utf-8",
        )
        self.code.write_text("0", encoding="utf-8")
        self.config = SinkConfig(command=Command(command=(sys.executable, str(script))))
        self.down = SinkConfig(
            command=Command(command=(sys.executable, "-c", "raise SystemExit(75)"))
        )

    def fail(self) -> None:
        self.code.write_text("75", encoding="utf-8")

    def refuse(self) -> None:
        self.code.write_text("1", encoding="utf-8")

    def received(self) -> list[bytes]:
        if not self.out.exists():
            return []
        return self.out.read_bytes().splitlines()


def webhook(url: str) -> SinkConfig:
    return SinkConfig(
        webhook=Webhook(
            url=Secret(f"{url}/in/{CANARY}"),
            secret=Secret(CANARY),
            headers={"X-Key": Secret(CANARY)},
            allow_private=True,
            timeout=TIMEOUT,
        )
    )


def slack(url: str) -> SinkConfig:
    return SinkConfig(
        slack=Slack(url=Secret(f"{url}/services/T000/B000/{CANARY}"), timeout=TIMEOUT)
    )


def slack_bot(url: str) -> SinkConfig:
    settings = Slack(
        token=Secret(f"xoxb-{CANARY}"), channel="#x", api_url=f"{url}/api/", timeout=TIMEOUT
    )
    return SinkConfig(slack=settings)


def apprise(url: str) -> SinkConfig:
    address = url.replace("http://", f"json://user:{CANARY}@")
    return SinkConfig(apprise=Apprise(url=Secret(f"{address}/{CANARY}"), timeout=TIMEOUT))


def alertmanager(url: str) -> SinkConfig:
    return SinkConfig(
        alertmanager=Alertmanager(
            urls=(url,), username="me", password=Secret(CANARY), timeout=TIMEOUT
        )
    )


def pagerduty(url: str) -> SinkConfig:
    settings = PagerDuty(
        routing_key=Secret(CANARY.ljust(32, "0")), url=f"{url}/v2/enqueue", timeout=TIMEOUT
    )
    return SinkConfig(pagerduty=settings)


def otlp_logs(url: str) -> SinkConfig:
    headers = {"Api-Key": Secret(CANARY)}
    return SinkConfig(otlp_logs=OtlpConnection(endpoint=url, headers=headers, timeout=TIMEOUT))


HTTP = {
    make.__name__: make
    for make in (webhook, slack, slack_bot, apprise, alertmanager, pagerduty, otlp_logs)
}


class HubReceiver(BuiltInReceiver):
    refuses_for_good = False

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.hub = stack.enter_context(Hub(directory, "--key", f"me={CANARY}"))
        text = self.hub.connection_string(key=CANARY, name="me")
        self.config = self._config(text)
        self.down = self._config(text.replace(str(self.hub.port), "9"))

    @staticmethod
    def _config(text: str) -> SinkConfig:
        return SinkConfig(event_hub=EventHub(connection_string=Secret(text), timeout=TIMEOUT))

    def fail(self) -> None:
        self.hub.order("reject:com.microsoft:server-busy")

    def refuse(self) -> None:
        self.hub.order("reject:amqp:not-found")

    def received(self) -> list[bytes]:
        return [event.body for event in self.hub.stored]


class KubernetesReceiver(BuiltInReceiver):
    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.cluster = stack.enter_context(kubernetes.Kubernetes(directory))
        self.cluster.rotate(CANARY)
        self.config = self._config(self.cluster.url)
        self.down = self._config("https://127.0.0.1:9")

    def _config(self, url: str) -> SinkConfig:
        return SinkConfig(
            kubernetes=Kubernetes(
                node_name=kubernetes.NODE,
                url=url,
                token=Secret(str(self.cluster.token_file), "file"),
                ca_file=str(self.cluster.ca_file),
                timeout=TIMEOUT,
            )
        )

    def fail(self) -> None:
        self.cluster.default = kubernetes.status(503, "etcdserver: leader changed")

    def refuse(self) -> None:
        self.cluster.default = kubernetes.status(422, f"invalid: {CANARY}")

    def received(self) -> list[bytes]:
        return [request.body for request in self.cluster.requests if request.method == "POST"]


class EventLogReceiver(BuiltInReceiver):
    refuses_for_good = False

    def __init__(self, stack: ExitStack) -> None:
        self.log = stack.enter_context(EventLog())
        self.config = SinkConfig(windows_event_log=WindowsEventLog())
        self.down = SinkConfig(windows_event_log=WindowsEventLog(source="down"))

    def fail(self) -> None:
        self.log.down = True

    def refuse(self) -> None:
        self.log.down = True

    def received(self) -> list[bytes]:
        return [entry.texts[0].encode() for entry in self.log.entries]


def receiver_of(kind: str, directory: Path, stack: ExitStack) -> BuiltInReceiver:
    if kind == "otlp_logs":
        return OtlpReceiver(otlp_logs, stack)
    if kind == "slack_bot":
        return SlackBotReceiver(slack_bot, stack)
    if kind in HTTP:
        return HttpReceiver(HTTP[kind], stack)
    others: dict[str, Callable[[], BuiltInReceiver]] = {
        "command": lambda: CommandReceiver(directory),
        "email": lambda: MailReceiver(stack),
        "event_hub": lambda: HubReceiver(directory, stack),
        "kubernetes": lambda: KubernetesReceiver(directory, stack),
        "windows_event_log": lambda: EventLogReceiver(stack),
    }
    return others[kind]()


BUILT_IN = [*(kind for kind in KINDS if kind != "plugin"), "slack_bot"]


@pytest.fixture(params=list(HTTP))
def http(request: pytest.FixtureRequest) -> Iterator[HttpReceiver]:
    with ExitStack() as stack:
        receiver = SlackBotReceiver if request.param == "slack_bot" else HttpReceiver
        yield receiver(HTTP[request.param], stack)


def failure(sink: Sink) -> SendError:
    with closing(sink), pytest.raises(SendError) as raised:
        sink.send(message())
    return raised.value


class TestBuiltInSinks(SinkContract):
    """The contract, for each built-in sink."""

    @pytest.fixture(params=BUILT_IN)
    def receiver(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BuiltInReceiver]:
        with ExitStack() as stack:
            yield receiver_of(request.param, tmp_path, stack)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_status_that_an_operator_can_mend_is_a_temporary_failure(
    http: HttpReceiver, status: int
) -> None:
    http.peer.default = Answer(status)

    error = failure(sink_of(http.config))

    assert not error.permanent
    assert error.by_hand


@pytest.mark.parametrize("status", [408, 425, 429, 500, 503])
def test_status_of_a_passing_failure_is_a_temporary_failure(
    http: HttpReceiver, status: int
) -> None:
    http.peer.default = Answer(status)

    error = failure(sink_of(http.config))

    assert not error.permanent
    assert not error.by_hand


@pytest.mark.parametrize("status", [301, 302, 307, 400, 410, 413, 422])
def test_status_of_a_refusal_is_a_permanent_failure(http: HttpReceiver, status: int) -> None:
    http.peer.default = Answer(status, (("Location", f"{http.peer.url}/elsewhere"),))

    error = failure(sink_of(http.config))

    assert error.permanent
    assert not error.by_hand
    assert len(http.received()) == 1  # no redirect was followed


def test_cut_connection_is_a_temporary_failure(http: HttpReceiver) -> None:
    http.peer.default = Answer(how="cut")

    error = failure(sink_of(http.config))

    assert not error.permanent
    assert not error.by_hand


def test_receiver_that_answers_too_late_is_a_temporary_failure(http: HttpReceiver) -> None:
    how = "drip"
    if http.config.kind == "apprise":  # waits for each drip, until the courier gives it up
        how = "hang"
    http.peer.default = Answer(how=how)
    settings: Any = msgspec.structs.replace(http.config.settings, timeout=Duration("500ms"))
    config = SinkConfig(**{http.config.kind: settings})

    error = failure(sink_of(config))

    assert not error.permanent


def retry_after(http: HttpReceiver, header: str) -> float | None:
    """Return the pause that a failure with this header asks for."""
    http.peer.default = Answer(503, (("Retry-After", header),))
    return failure(sink_of(http.config)).retry_after


# apprise does not pass headers on
with_headers = pytest.mark.parametrize(
    "http", [kind for kind in HTTP if kind != "apprise"], indirect=True
)


@with_headers
def test_retry_after_in_seconds_is_passed_on(http: HttpReceiver) -> None:
    assert retry_after(http, "17") == 17


@with_headers
def test_retry_after_as_a_date_is_passed_on_in_seconds(http: HttpReceiver) -> None:
    later = datetime.now(UTC) + timedelta(seconds=600)

    seconds = retry_after(http, format_datetime(later, usegmt=True))

    assert seconds is not None
    assert 500 < seconds <= 600


def test_unreadable_retry_after_is_ignored(http: HttpReceiver) -> None:
    assert retry_after(http, "soon") is None


PAGES = {
    "doctype": b"<!DOCTYPE html><title>Sign in</title>",
    "byte order mark": b"\xef\xbb\xbf\n <HTML><body>Sign in</body></HTML>",
    "comment": b"<!-- portal -->\n<html lang='en'><title>Sign in</title>",
    "XML": b"<?xml version='1.0'?>\n<!DOCTYPE html PUBLIC '-//W3C//DTD'><html>Sign in</html>",
    "script": b"<script>location.href = '/login'</script> Sign in",
}


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
@pytest.mark.parametrize("make", [webhook, slack, slack_bot, alertmanager, pagerduty])
def test_web_page_of_a_captive_portal_is_refused_for_good_and_named(
    peer: HttpPeer, make: Callable[[str], SinkConfig], page: bytes
) -> None:
    peer.default = Answer(body=page)

    error = failure(sink_of(make(peer.url)))

    assert error.permanent
    assert "a web page answers in place of the receiver" in str(error)
    assert "Sign in" in str(error)


@pytest.mark.parametrize("body", [b"", b"ok", b"accepted <html>", b"<Response></Response>", b"{}"])
@pytest.mark.parametrize("make", [webhook, slack, alertmanager, pagerduty])
def test_any_success_that_is_no_web_page_accepts(
    peer: HttpPeer, make: Callable[[str], SinkConfig], body: bytes
) -> None:
    peer.default = Answer(body=body)

    with closing(sink_of(make(peer.url))) as sink:
        sink.send(message())

    assert len(peer.requests) == 1


ENDLESS = b"x" * 30_000_000
# otlp_logs and slack_bot need an answer of a known form
ANY_FORM = [kind for kind in HTTP if kind not in ("otlp_logs", "slack_bot")]


@pytest.mark.parametrize("http", ANY_FORM, indirect=True)
def test_endless_answer_of_a_success_accepts(http: HttpReceiver) -> None:
    http.peer.default = Answer(200, (), ENDLESS)

    with closing(sink_of(http.config)) as sink:
        sink.send(message())

    assert len(http.received()) == 1


@pytest.mark.parametrize("http", ["otlp_logs", "slack_bot"], indirect=True)
def test_endless_answer_without_the_known_form_is_a_failure(http: HttpReceiver) -> None:
    http.peer.default = Answer(200, (), ENDLESS)

    error = failure(sink_of(http.config))

    assert not error.permanent
    assert len(http.received()) == 1


# the library of apprise reads every answer to its end
@pytest.mark.parametrize("http", [kind for kind in HTTP if kind != "apprise"], indirect=True)
@pytest.mark.parametrize("status", [200, 302])
def test_endless_answer_is_not_read_to_its_end(http: HttpReceiver, status: int) -> None:
    http.peer.default = Answer(status, (("Location", "/elsewhere"),), ENDLESS)

    with closing(sink_of(http.config)) as sink, suppress(SendError):
        sink.send(message())

    assert not http.peer.read_whole


def test_endless_answer_of_a_redirect_is_a_permanent_failure(http: HttpReceiver) -> None:
    http.peer.default = Answer(302, (("Location", "/elsewhere"),), ENDLESS)

    error = failure(sink_of(http.config))

    assert error.permanent
    assert len(http.received()) == 1
