"""The particulars of each sink, against real receivers."""

import gc
import hashlib
import hmac
import json
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import trustme

from notbefore.config.secret import Secret
from notbefore.config.sinks import Alertmanager, Apprise, Command, SinkConfig, Webhook
from notbefore.core.duration import Duration
from notbefore.core.message import Message
from notbefore.core.text import rfc3339
from notbefore.courier.sink import Receipt
from notbefore.courier.sinks.command import run
from notbefore.errors import SendError
from notbefore.net.http import Http
from peers.pagerduty import ROUTING_KEY, PagerDuty
from support.agent import NOWHERE, PATIENCE, eventually, has_ended
from support.azure import ID, ME, STARTED, T0, at
from support.messages import message, sent, with_record_fields
from support.peers import Answer, HttpPeer, Request, black_hole
from support.raw_server import serving, tunnel


def webhook(peer: HttpPeer, path: str = "/hook", **fields: Any) -> SinkConfig:
    settings = {"allow_private": True, "timeout": Duration("60s"), **fields}
    return SinkConfig(webhook=Webhook(url=Secret(peer.url + path), **settings))


def test_webhook_gets_the_record_with_the_delivery_id(peer: HttpPeer) -> None:
    announced = message()

    sent(webhook(peer, headers={"X-Api-Key": Secret("k")}), announced)

    (request,) = peer.requests
    values = json.loads(request.body)
    assert values.items() >= json.loads(announced.record.line()).items()
    assert values["notbefore.delivery.kind"] == "announced"
    assert values["notbefore.delivery.id"] == announced.delivery_id
    assert request.headers["x-notbefore-delivery-id"] == announced.delivery_id
    assert request.headers["x-api-key"] == "k"
    assert request.path == "/hook"


def test_webhook_signs_the_time_and_the_body(peer: HttpPeer) -> None:
    sent(webhook(peer, secret=Secret("s3cret")))

    (request,) = peer.requests
    time_part, digest_part = request.headers["x-notbefore-signature"].split(",")
    seconds = time_part.partition("=")[2]
    signed = seconds.encode() + b"." + request.body
    assert digest_part.partition("=")[2] == hmac.new(b"s3cret", signed, hashlib.sha256).hexdigest()


def test_webhook_sends_the_delivery_id_as_idempotency_key(peer: HttpPeer) -> None:
    announced = message()

    sent(webhook(peer), announced)

    (request,) = peer.requests
    assert request.headers["idempotency-key"] == f'"{announced.delivery_id}"'


def test_webhook_over_tls_requires_both_certificates(authority: trustme.CA, tmp_path: Path) -> None:
    ca_file = tmp_path / "ca.pem"
    certificate = tmp_path / "client.pem"
    authority.cert_pem.write_to_path(ca_file)
    authority.issue_cert("vm@example.org").private_key_and_cert_chain_pem.write_to_path(certificate)
    with HttpPeer(authority, client_ca=authority) as peer:
        sent(webhook(peer, ca_file=str(ca_file), cert_file=str(certificate)))

        assert len(peer.requests) == 1
        with pytest.raises(SendError, match="CERTIFICATE_VERIFY_FAILED"):
            sent(webhook(peer, cert_file=str(certificate)))
        with pytest.raises(SendError):
            sent(webhook(peer, ca_file=str(ca_file)))
        assert len(peer.requests) == 1


def through_apprise(address: str, *messages: Message) -> list[Receipt]:
    """Send the messages through apprise to a service, without messages a default one."""
    config = SinkConfig(apprise=Apprise(url=Secret(address), timeout=Duration("60s")))
    return sent(config, *messages)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_webhook_reaches_no_private_address_by_default(peer: HttpPeer, host: str) -> None:
    url = Secret(f"http://{host}:{peer.port}/")

    with pytest.raises(SendError, match="is not a public address") as raised:
        sent(SinkConfig(webhook=Webhook(url=url)))
    assert raised.value.permanent
    assert peer.requests == []


@pytest.mark.parametrize("host", ["inside.example.org", "10.1.2.3"])
def test_webhook_reaches_no_private_address_through_a_proxy(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = socket.getaddrinfo
    addresses = {"inside.example.org": "192.168.7.7"}

    def resolve_inside(name: str, *rest: Any, **more: Any) -> Any:
        return resolve(addresses.get(name, name), *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve_inside)
    with HttpPeer() as peer, serving(tunnel(peer.port)) as (proxy, proxy_requests):
        monkeypatch.setenv("HTTPS_PROXY", proxy)
        monkeypatch.setenv("NO_PROXY", "")

        with pytest.raises(SendError, match="is not a public address") as raised:
            sent(SinkConfig(webhook=Webhook(url=Secret(f"https://{host}/hook"))))

        assert raised.value.permanent
        assert proxy_requests == []


UNRESOLVED: Final = Secret("https://hook.invalid/in")  # a proxy may know its address


def test_unresolved_host_behind_a_proxy_is_a_temporary_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with HttpPeer() as peer, serving(tunnel(peer.port)) as (proxy, proxy_requests):
        monkeypatch.setenv("HTTPS_PROXY", proxy)
        monkeypatch.setenv("NO_PROXY", "")

        with pytest.raises(
            SendError, match=r"hook\.invalid cannot be resolved here, .* set `allow_private"
        ) as raised:
            sent(SinkConfig(webhook=Webhook(url=UNRESOLVED)))

        assert not raised.value.permanent
        assert proxy_requests == []


def test_proxy_resolves_the_host_when_private_addresses_are_allowed(
    authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca_file = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(ca_file)
    hook = Webhook(
        url=UNRESOLVED, ca_file=str(ca_file), allow_private=True, timeout=Duration("60s")
    )
    with (
        HttpPeer(authority, "hook.invalid") as peer,
        serving(tunnel(peer.port)) as (proxy, proxy_requests),
    ):
        monkeypatch.setenv("HTTPS_PROXY", proxy)
        monkeypatch.setenv("NO_PROXY", "")

        sent(SinkConfig(webhook=hook))

        assert [head.split(b" ")[1] for head in proxy_requests] == [b"hook.invalid:443"]
        assert len(peer.requests) == 1


def test_failure_names_the_proxy_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", NOWHERE)
    monkeypatch.setenv("NO_PROXY", "")

    with pytest.raises(SendError, match=r"^hook\.invalid: the proxy: "):
        sent(SinkConfig(webhook=Webhook(url=UNRESOLVED, allow_private=True)))


def test_silent_address_leaves_time_for_the_next_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with HttpPeer() as peer, black_hole(peer.port) as silent:
        resolve = socket.getaddrinfo
        addresses = [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, peer.port))
            for address in (silent, "127.0.0.1")
        ]

        def resolve_to_both(name: str, *rest: Any, **more: Any) -> Any:
            if "." in name:
                return addresses
            return resolve(name, *rest, **more)

        monkeypatch.setattr(socket, "getaddrinfo", resolve_to_both)
        url = Secret(f"http://many.example.org:{peer.port}/")

        sent(SinkConfig(webhook=Webhook(url=url, allow_private=True, timeout=Duration("12s"))))

        assert peer.requests[0].headers["host"] == f"many.example.org:{peer.port}"


@pytest.fixture
def _netrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that has a password for every server of the tests."""
    file = tmp_path / ".netrc"
    file.write_text("machine 127.0.0.1 login me password mine", encoding="utf-8")
    monkeypatch.setenv("NETRC", str(file))


@pytest.mark.usefixtures("_netrc")
def test_webhook_does_not_send_a_password_of_netrc(peer: HttpPeer) -> None:
    sent(webhook(peer))

    assert "authorization" not in peer.requests[0].headers


@pytest.mark.usefixtures("_netrc")
def test_apprise_does_not_send_a_password_of_netrc(peer: HttpPeer) -> None:
    through_apprise(f"json://127.0.0.1:{peer.port}/?+Authorization=own")

    assert peer.requests[0].headers["authorization"] == "own"


def test_password_in_the_url_does_not_replace_authorization_header(peer: HttpPeer) -> None:
    url = peer.url.replace("://", "://user:password@")
    http = Http(60.0)

    http.post(url, {"Authorization": "Bearer own"}).check()
    http.close()

    assert peer.requests[0].headers["authorization"] == "Bearer own"


@pytest.mark.parametrize("level", ["DEBUG", "CRITICAL"])
def test_apprise_failure_has_its_cause_at_any_log_level(
    peer: HttpPeer, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(level)
    peer.default = Answer(404)

    with pytest.raises(SendError, match="404"):
        through_apprise(f"json://127.0.0.1:{peer.port}/")


def test_webhook_has_the_same_dedup_key_in_each_message_of_an_event(peer: HttpPeer) -> None:
    messages = [message(), message({}, STARTED), message({}, STARTED, None)]

    receipts = sent(webhook(peer, dedup_key="incident"), *messages)

    keys = [json.loads(request.body)["incident"] for request in peer.requests]
    assert keys == [messages[0].alert_key] * 3
    assert [receipt.thread for receipt in receipts] == keys


HOSTILE: Final = "*bold* [link](http://other.example) <at>all</at> # web_0_1"


def test_teams_through_apprise_gets_lines_and_escaped_markdown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    authority = trustme.CA()
    bundle = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(bundle))
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(bundle))

    with HttpPeer(authority, "127.0.0.1") as teams:
        through_apprise(
            f"workflows://127.0.0.1:{teams.port}/flow/signature/",
            message({"Description": HOSTILE}),
        )

    (card,) = json.loads(teams.requests[0].body)["attachments"]
    (body,) = (block["text"] for block in card["content"]["body"] if block.get("id") == "body")
    assert "\n\nAffected VMs: WestNO\\_0\n\n" in body
    assert "\\*bold\\* \\[link\\]" in body
    assert "web\\_0\\_1" in body
    assert "\n" not in body.replace("\n\n", "")


def test_text_receiver_through_apprise_gets_the_plain_text(peer: HttpPeer) -> None:
    through_apprise(f"json://127.0.0.1:{peer.port}/", message({"Description": HOSTILE}))

    text = json.loads(peer.requests[0].body)["message"]
    assert f"Azure's description: {HOSTILE}\n" in text.replace("\u200b", "")


@pytest.fixture
def pager(monkeypatch: pytest.MonkeyPatch) -> Iterator[PagerDuty]:
    """A PagerDuty that apprise reaches."""
    import apprise.plugins.pagerduty as plugin  # noqa: PLC0415 - half a second

    with PagerDuty() as running:
        monkeypatch.setitem(plugin.PAGERDUTY_API_LOOKUP, "us", f"{running.url}/v2/enqueue")
        yield running
        assert not running.faults


def test_pagerduty_through_apprise_opens_and_closes_one_incident(pager: PagerDuty) -> None:
    messages = [message(), message({}, STARTED), message({}, STARTED, None)]

    receipts: list[Receipt] = []
    for step in messages:
        receipts += through_apprise(f"pagerduty://{ROUTING_KEY}@x", step)

    assert [receipt.thread for receipt in receipts] == [messages[0].alert_key] * 3
    assert pager.effects == ["opened", "added", "resolved"]


def test_pagerduty_through_apprise_keeps_the_parameters_of_the_user(pager: PagerDuty) -> None:
    through_apprise(f"pagerduty://{ROUTING_KEY}@x?dedup=mine&action=trigger", message({}, None))

    assert pager.steps[-1].dedup_key == "mine"
    assert pager.effects == ["opened"]


@pytest.fixture
def opsgenie(peer: HttpPeer, monkeypatch: pytest.MonkeyPatch) -> HttpPeer:
    """An Opsgenie that apprise reaches."""
    import apprise.plugins.opsgenie as plugin  # noqa: PLC0415 - half a second

    monkeypatch.setitem(plugin.OPSGENIE_API_LOOKUP, "us", f"{peer.url}/v2/alerts")
    peer.default = Answer(202, body=b'{"requestId": "r-1"}')
    return peer


def test_opsgenie_through_apprise_names_the_alert_after_the_event(opsgenie: HttpPeer) -> None:
    through_apprise("opsgenie://key", message(severity="critical"))

    (request,) = opsgenie.requests
    assert json.loads(request.body)["alias"] == f"notbefore/{ID.casefold()}"


def test_end_fails_for_good_when_apprise_sends_nothing_of_it(opsgenie: HttpPeer) -> None:
    with pytest.raises(SendError, match=r"sent nothing: .* close the alert by hand") as raised:
        through_apprise("opsgenie://key", message({}, None))

    assert raised.value.permanent
    assert opsgenie.requests == []


def test_information_fails_when_apprise_sends_nothing_of_it(opsgenie: HttpPeer) -> None:
    with pytest.raises(SendError, match=r"add `&:info=new`"):
        through_apprise("opsgenie://key", message())

    assert opsgenie.requests == []


def test_information_is_sent_when_the_url_maps_it_to_an_alert(opsgenie: HttpPeer) -> None:
    through_apprise("opsgenie://key?:info=new", message())

    assert len(opsgenie.requests) == 1


def alertmanager(*urls: str, **fields: Any) -> SinkConfig:
    return SinkConfig(alertmanager=Alertmanager(urls=urls, timeout=Duration("60s"), **fields))


def alert_of(request: Request) -> dict[str, Any]:
    (alert,) = json.loads(request.body)
    assert isinstance(alert, dict)
    return alert


def test_event_is_one_alert_until_it_ends(peer: HttpPeer) -> None:
    receipts = sent(
        alertmanager(peer.url, resolve_timeout=Duration("3m"), labels={"team": "compute"}),
        message(),
        message({}, STARTED),
        message({}, STARTED, None),
    )

    announced, started, finished = (alert_of(request) for request in peer.requests)
    assert peer.requests[0].path == "/api/v2/alerts"
    assert announced["labels"] == started["labels"] == finished["labels"]
    assert announced["labels"]["team"] == "compute"
    assert announced["startsAt"] == finished["startsAt"]
    assert "endsAt" not in announced
    assert finished["endsAt"] > rfc3339(T0)
    assert [receipt.repeat for receipt in receipts] == [60.0, 60.0, None]


def test_alert_ends_at_its_start_when_the_clock_of_the_vm_is_ahead(peer: HttpPeer) -> None:
    finished = msgspec.structs.replace(message({}, STARTED, None), now=T0)

    (receipt,) = sent(alertmanager(peer.url), finished)

    alert = alert_of(peer.requests[0])
    assert alert["startsAt"] == alert["endsAt"] == rfc3339(T0)
    assert receipt.repeat is None


def test_alert_of_silent_vms_lasts_for_weeks_without_repetition(peer: HttpPeer) -> None:
    silent = with_record_fields(message({"EventType": "Silent"}), fleet_events=1)

    (receipt,) = sent(alertmanager(peer.url), silent)

    assert alert_of(peer.requests[0])["endsAt"] > rfc3339(at(20 * 86_400))
    assert receipt.repeat is None


def test_alert_keeps_its_labels_when_the_event_changes(peer: HttpPeer) -> None:
    first = {"EventType": "Reboot", "Resources": [ME]}
    changes: list[dict[str, Any]] = [
        {"Resources": ["web_1", ME, "web_2"]},
        {"Resources": ["web_1"]},
        {"EventSource": "User"},
        {"EventType": "Redeploy"},
        {"DurationInSeconds": 5},
        {"NotBefore": "Mon, 02 Mar 2026 12:00:00 GMT", "Description": "another"},
        STARTED,
    ]
    (receipt,) = sent(alertmanager(peer.url), message(first))
    updates = [message(first, first | change, thread=receipt.thread) for change in changes]

    sent(alertmanager(peer.url), *updates)

    labels, *updated_labels = (alert_of(request)["labels"] for request in peer.requests)
    assert updated_labels == [labels] * len(changes)


def test_alert_keeps_the_severity_of_its_route(peer: HttpPeer) -> None:
    short = {"EventType": "Freeze", "DurationInSeconds": 5}
    (receipt,) = sent(alertmanager(peer.url), message(short, severity="critical"))

    # the receipt of the first message decides; the routes of later changes do not
    sent(
        alertmanager(peer.url),
        message(short, short | STARTED, thread=receipt.thread),
        message(short, short | STARTED, None, thread=receipt.thread),
    )

    assert {alert_of(request)["labels"]["severity"] for request in peer.requests} == {"critical"}


def test_more_severe_event_is_another_alert_and_ends_the_first(peer: HttpPeer) -> None:
    short = {"EventType": "Freeze", "DurationInSeconds": 5}
    longer = short | {"DurationInSeconds": 30}

    (first,) = sent(alertmanager(peer.url), message(short))
    (second,) = sent(alertmanager(peer.url), message(short, longer, thread=first.thread))
    sent(alertmanager(peer.url), message(short, longer, short, thread=second.thread))

    announced, lengthened, shortened = (json.loads(request.body) for request in peer.requests)
    assert severity_and_end(announced) == [("info", False)]
    assert severity_and_end(lengthened) == [("warning", False), ("info", True)]
    assert severity_and_end(shortened) == [("warning", False)]


def severity_and_end(alerts: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    """Return the severity of each alert, and whether the alert ends."""
    return [(alert["labels"]["severity"], "endsAt" in alert) for alert in alerts]


def test_alert_is_delivered_when_one_member_accepts() -> None:
    with HttpPeer() as accepting, HttpPeer() as failing:
        failing.default = Answer(500)

        sent(alertmanager(NOWHERE, failing.url, accepting.url))

        assert len(accepting.requests) == 1
        assert len(failing.requests) == 1


def test_alert_fails_temporarily_when_no_member_accepts(peer: HttpPeer) -> None:
    peer.default = Answer(500)

    with pytest.raises(SendError, match=r"Connection refused.*; 500") as raised:
        sent(alertmanager(NOWHERE, peer.url))

    assert not raised.value.permanent


def test_alert_is_not_refused_for_good_while_a_member_is_down(peer: HttpPeer) -> None:
    peer.default = Answer(400)

    with pytest.raises(SendError) as raised:
        sent(alertmanager(NOWHERE, peer.url))

    assert not raised.value.permanent


def test_alert_is_refused_for_good_when_every_member_refuses_it(peer: HttpPeer) -> None:
    peer.default = Answer(400)

    with pytest.raises(SendError) as raised:
        sent(alertmanager(peer.url, peer.url))

    assert raised.value.permanent


@pytest.mark.parametrize(
    ("fields", "header"),
    [
        ({"token": Secret("t")}, "Bearer t"),
        ({"username": "u", "password": Secret("p")}, "Basic dTpw"),
        ({"headers": {"Authorization": Secret("own")}}, "own"),
        ({}, None),
    ],
    ids=["token", "password", "header", "none"],
)
@pytest.mark.parametrize("kind", ["alertmanager", "webhook"])
def test_sink_sends_its_authorization(
    peer: HttpPeer, kind: str, fields: dict[str, Any], header: str | None
) -> None:
    config = webhook(peer, **fields)
    if kind == "alertmanager":
        config = alertmanager(peer.url, **fields)

    sent(config)

    assert peer.requests[0].headers.get("authorization") == header


def test_alertmanager_gets_the_configured_headers(peer: HttpPeer) -> None:
    headers = {"X-Scope-OrgID": Secret("tenant-1"), "content-type": Secret("text/plain")}

    sent(alertmanager(peer.url, headers=headers, token=Secret("t")))

    (request,) = peer.requests
    assert request.headers["x-scope-orgid"] == "tenant-1"
    assert request.headers["authorization"] == "Bearer t"
    assert request.headers["content-type"] == "application/json"


def python(script: str, **fields: Any) -> SinkConfig:
    return SinkConfig(command=Command(command=(sys.executable, "-c", script), **fields))


def shell(script: str, **fields: Any) -> SinkConfig:
    return SinkConfig(command=Command(command=("/bin/sh", "-c", script), **fields))


def input_of_command(sent_message: Message, directory: Path) -> tuple[Any, dict[str, str]]:
    """Send a message to a command; return its standard input and its environment."""
    out = directory / "out"
    script = (
        "import json, os, sys; json.dump([json.load(sys.stdin), dict(os.environ)],"
        " open(sys.argv[1], 'w'))"
    )
    command = (sys.executable, "-c", script, str(out))
    sent(SinkConfig(command=Command(command=command)), sent_message)
    record, environment = json.loads(out.read_text(encoding="utf-8"))
    return record, environment


def test_command_gets_the_record_and_plain_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGER_TOKEN", "not for commands")
    monkeypatch.setenv("SYSTEMROOT", r"C:\Windows")  # most programs of Windows need it
    announced = message()

    record, environment = input_of_command(announced, tmp_path)

    assert record == json.loads(announced.record.line())
    assert environment["NOTBEFORE_CHANGE"] == "announced"
    assert environment["NOTBEFORE_EVENT_TYPE"] == "Freeze"
    assert environment["NOTBEFORE_EVENT_RESOURCES"] == ME
    assert environment["NOTBEFORE_DELIVERY_ID"] == announced.delivery_id
    assert "PAGER_TOKEN" not in environment
    assert environment["SYSTEMROOT"] == r"C:\Windows"


def test_command_gets_no_variable_of_a_long_list_of_vms(tmp_path: Path) -> None:
    names = [f"a-scale-set-with-a-long-name_{number}" for number in range(400)]

    record, environment = input_of_command(message({"Resources": names}), tmp_path)

    assert record["azure.scheduled_event.resources"] == names
    assert "NOTBEFORE_EVENT_RESOURCES" not in environment  # rather than a part of the list


def test_texts_of_azure_are_not_executed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    evil = f"$(touch {out}); `touch {out}` && touch {out}\0"

    sent(python("pass"), message({"Description": evil, "Resources": [evil]}))

    assert not out.exists()


def test_last_output_of_a_command_is_the_cause_of_its_failure() -> None:
    script = "import sys; print('x' * 10**6); print('no such node'); sys.exit(3)"

    with pytest.raises(SendError, match=r"exit code 3: x+ no such node"):
        sent(python(script))


def test_killed_command_is_a_temporary_failure() -> None:
    with pytest.raises(SendError, match="signal 9") as raised:
        sent(python("import os; os.kill(os.getpid(), 9)"))

    assert not raised.value.permanent


def test_command_and_its_children_end_at_the_timeout(tmp_path: Path) -> None:
    out = tmp_path / "pid"
    script = f"sleep 600 & echo $! > {out}; wait"

    for seconds in (2, 10, 50):  # until the shell has started the child before the timeout
        with pytest.raises(SendError, match=f"not done after {seconds} s") as raised:
            sent(shell(script, timeout=Duration(f"{seconds}s")))
        if out.exists() and out.read_text(encoding="utf-8"):
            break

    pid = int(out.read_text(encoding="utf-8"))
    eventually(lambda: has_ended(pid))
    assert not raised.value.permanent


class BackgroundProcess:
    """A process that a command leaves in the background. It writes a file when it is released."""

    def __init__(self, directory: Path) -> None:
        self._pid = directory / "pid"
        self._released = directory / "released"
        self._output = directory / "output"
        wait = f"until [ -e {self._released} ]; do sleep 0.05; done"
        self.script = f"({wait}; echo done > {self._output}) & echo $! > {self._pid}"

    @property
    def pid(self) -> int:
        return int(self._pid.read_text(encoding="utf-8"))

    def release(self) -> None:
        self._released.touch()

    def has_written(self) -> bool:
        return self._output.exists()


def test_background_process_survives_a_successful_command(tmp_path: Path) -> None:
    process = BackgroundProcess(tmp_path)

    sent(shell(f"{process.script}; exit 0"))
    process.release()

    eventually(process.has_written)


def test_background_process_ends_with_a_failed_command(tmp_path: Path) -> None:
    process = BackgroundProcess(tmp_path)

    with pytest.raises(SendError, match="exit code 75"):
        sent(shell(f"{process.script}; exit 75"))

    eventually(lambda: has_ended(process.pid))


def test_large_output_of_a_command_fills_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    script = """
import sys
for _ in range(2_000):
    sys.stdout.write("x" * 100_000)
print("the last word")
sys.exit(4)
"""

    with pytest.raises(SendError, match=r"exit code 4: x+the last word"):
        sent(python(script, timeout=Duration("60s")))

    assert list(tmp_path.iterdir()) == []


def test_missing_command_is_refused_for_good() -> None:
    with pytest.raises(SendError, match="No such file") as raised:
        sent(SinkConfig(command=Command(command=("/no/such/command",))))

    assert raised.value.permanent


def test_apprise_makes_no_pauses_between_messages(peer: HttpPeer) -> None:
    started = time.monotonic()

    through_apprise(f"json://127.0.0.1:{peer.port}/", *[message()] * 40)

    assert len(peer.requests) == 40
    assert time.monotonic() - started < PATIENCE  # apprise's own pauses would take 5.5 s each


@pytest.mark.parametrize("timeout", [0.0, 0.3])
def test_command_that_ignores_its_input_leaves_no_pipe_open(
    recwarn: pytest.WarningsRecorder, timeout: float
) -> None:
    with pytest.raises(SendError, match="not done after"):
        run(["/bin/sleep", "60"], b"x" * 1_000_000, {}, timeout)
    gc.collect()

    assert ResourceWarning not in [warning.category for warning in recwarn]
