"""What is particular to each sink, against real receivers."""

import gc
import hashlib
import hmac
import json
import socket
import sys
import time
from contextlib import nullcontext
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
from support.agent import eventually, has_ended
from support.azure import ID, ME, STARTED, T0, at
from support.messages import message, sent, with_record_fields
from support.peers import Answer, HttpPeer, Request, black_hole
from support.raw_server import serving, tunnel


def webhook(peer: HttpPeer, path: str = "/hook", **fields: Any) -> SinkConfig:
    settings = {"allow_private": True, "timeout": Duration("60s"), **fields}
    return SinkConfig(webhook=Webhook(url=Secret(peer.url + path), **settings))


def test_webhook_gets_a_signed_record_with_the_delivery_id(peer: HttpPeer) -> None:
    one = message()
    sent(webhook(peer, headers={"X-Api-Key": Secret("k")}, secret=Secret("s3cret")), one)
    (request,) = peer.requests
    values = json.loads(request.body)

    assert values.items() >= json.loads(one.record.line()).items()
    assert values["notbefore.delivery.kind"] == "announced"
    assert (
        request.headers["x-notbefore-delivery-id"]
        == values["notbefore.delivery.id"]
        == one.delivery_id
    )
    assert request.headers["x-api-key"] == "k"
    assert request.path == "/hook"

    seconds, digest = (
        part.partition("=")[2] for part in request.headers["x-notbefore-signature"].split(",")
    )
    assert (
        hmac.new(b"s3cret", seconds.encode() + b"." + request.body, hashlib.sha256).hexdigest()
        == digest
    )


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
    with HttpPeer() as peer, serving(tunnel(peer.port)) as (proxy, asked):
        monkeypatch.setenv("HTTPS_PROXY", proxy)
        monkeypatch.setenv("NO_PROXY", "")
        ask = socket.getaddrinfo
        address = {"inside.example.org": "192.168.7.7"}

        monkeypatch.setattr(
            socket,
            "getaddrinfo",
            lambda name, *rest, **more: ask(address.get(name, name), *rest, **more),
        )

        with pytest.raises(SendError, match="is not a public address") as raised:
            sent(SinkConfig(webhook=Webhook(url=Secret(f"https://{host}/hook"))))
        assert raised.value.permanent
        assert asked == []


def test_unresolved_host_behind_a_proxy_is_a_temporary_failure(
    authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    url = Secret("https://hook.invalid/in")
    ca_file = str(tmp_path / "ca.pem")

    with HttpPeer(authority, "hook.invalid") as peer, serving(tunnel(peer.port)) as (proxy, asked):
        monkeypatch.setenv("HTTPS_PROXY", proxy)
        monkeypatch.setenv("NO_PROXY", "")

        with pytest.raises(
            SendError, match=r"hook\.invalid cannot be resolved here, .* set `allow_private"
        ) as raised:
            sent(SinkConfig(webhook=Webhook(url=url, ca_file=ca_file)))
        assert not raised.value.permanent
        assert asked == []

        sent(SinkConfig(webhook=Webhook(url=url, ca_file=ca_file, allow_private=True)))
        assert [head.split(b" ")[1] for head in asked] == [b"hook.invalid:443"]
        assert len(peer.requests) == 1

    with pytest.raises(SendError, match=r"^hook\.invalid: the proxy: "):  # it is gone
        sent(SinkConfig(webhook=Webhook(url=url, allow_private=True)))


def test_silent_address_leaves_time_for_the_next_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with HttpPeer() as peer, black_hole(peer.port) as address:
        found = [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, peer.port))
            for one in (address, "127.0.0.1")
        ]
        ask = socket.getaddrinfo
        monkeypatch.setattr(
            socket,
            "getaddrinfo",
            lambda name, *rest, **more: found if "." in name else ask(name, *rest, **more),
        )
        url = Secret(f"http://many.example.org:{peer.port}/")

        sent(SinkConfig(webhook=Webhook(url=url, allow_private=True, timeout=Duration("12s"))))

        assert peer.requests[0].headers["host"] == f"many.example.org:{peer.port}"


def test_sinks_do_not_send_passwords_of_netrc(
    peer: HttpPeer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password mine", encoding="utf-8")
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    sent(webhook(peer))

    sent(
        SinkConfig(apprise=Apprise(url=Secret(f"json://127.0.0.1:{peer.port}/?+Authorization=own")))
    )

    assert [request.headers.get("authorization") for request in peer.requests] == [None, "own"]


def test_authorization_header_is_not_replaced_by_a_password_in_the_url(peer: HttpPeer) -> None:
    http = Http(60.0)
    http.post(peer.url.replace("://", "://user:password@"), {"Authorization": "Bearer own"}).check()

    http.close()

    assert peer.requests[0].headers["authorization"] == "Bearer own"


@pytest.mark.parametrize("level", ["DEBUG", "CRITICAL"])
def test_apprise_failure_has_its_cause_at_any_log_level(
    peer: HttpPeer, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(level)

    peer.default = Answer(404)

    with pytest.raises(SendError, match="404"):
        sent(SinkConfig(apprise=Apprise(url=Secret(f"json://127.0.0.1:{peer.port}/"))))


def test_webhook_has_the_same_dedup_key_in_each_message_of_an_event(peer: HttpPeer) -> None:
    messages = [message(), message({}, STARTED), message({}, STARTED, None)]

    receipts = sent(webhook(peer, dedup_key="incident"), *messages)

    keys = [json.loads(request.body)["incident"] for request in peer.requests]

    assert keys == [messages[0].alert_key] * 3
    assert [receipt.thread for receipt in receipts] == keys


def through_apprise(address: str, *messages: Message) -> list[Receipt]:
    return sent(SinkConfig(apprise=Apprise(url=Secret(address))), *messages)


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


def test_pagerduty_through_apprise_opens_and_closes_one_incident(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import apprise.plugins.pagerduty as plugin  # noqa: PLC0415 - half a second

    with PagerDuty() as pager:
        monkeypatch.setitem(plugin.PAGERDUTY_API_LOOKUP, "us", f"{pager.url}/v2/enqueue")
        for one in (
            message(),
            message({}, STARTED),
            message({}, STARTED, None),
        ):  # each from a courier of its own
            (receipt,) = through_apprise(f"pagerduty://{ROUTING_KEY}@x", one)
            assert receipt.thread == one.alert_key

        assert pager.effects == ["opened", "added", "resolved"]

        through_apprise(f"pagerduty://{ROUTING_KEY}@x?dedup=mine&action=trigger", message({}, None))

        assert pager.steps[-1].dedup_key == "mine"  # what the user wrote stays
        assert pager.effects[-1] == "opened"
        assert not pager.wrong


def test_apprise_delivers_nothing_when_its_service_ignores_the_message(
    peer: HttpPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    import apprise.plugins.opsgenie as plugin  # noqa: PLC0415 - half a second

    monkeypatch.setitem(plugin.OPSGENIE_API_LOOKUP, "us", f"{peer.url}/v2/alerts")
    peer.default = Answer(202, body=b'{"requestId": "r-1"}')
    through_apprise("opsgenie://key", message(severity="critical"))

    assert json.loads(peer.requests[0].body)["alias"] == f"notbefore/{ID.casefold()}"
    with pytest.raises(SendError, match=r"sent nothing: .* close the alert by hand") as raised:
        through_apprise("opsgenie://key", message({}, None))
    assert raised.value.permanent
    with pytest.raises(SendError, match=r"add `&:info=new`"):
        through_apprise("opsgenie://key", message())
    assert len(peer.requests) == 1

    through_apprise("opsgenie://key?:info=new", message())
    assert len(peer.requests) == 2


def alertmanager(*urls: str, **fields: Any) -> SinkConfig:
    return SinkConfig(alertmanager=Alertmanager(urls=urls, timeout=Duration("60s"), **fields))


def alert_of(request: Request) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(request.body)[0]
    return found


def test_event_is_one_alert_until_it_ends(peer: HttpPeer) -> None:
    receipts = sent(
        alertmanager(peer.url, resolve_timeout=Duration("3m"), labels={"team": "compute"}),
        message(),
        message({}, STARTED),
        message({}, STARTED, None),
        msgspec.structs.replace(message({}, STARTED, None), now=T0),  # the clock of the VM is ahead
        with_record_fields(message({"EventType": "Silent"}), fleet_events=1),
    )

    announced, started, finished, ahead, missing = (alert_of(request) for request in peer.requests)

    assert peer.requests[0].path == "/api/v2/alerts"
    assert announced["labels"] == started["labels"] == finished["labels"]
    assert announced["labels"]["team"] == "compute"
    assert announced["startsAt"] == finished["startsAt"]
    assert "endsAt" not in announced
    assert "endsAt" in finished
    assert ahead["startsAt"] == ahead["endsAt"] == rfc3339(T0) < finished["endsAt"]
    assert [receipt.repeat for receipt in receipts] == [60.0, 60.0, None, None, None]
    assert missing["endsAt"] > rfc3339(at(20 * 86_400))  # a fleet's VM may be missing for so long


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
    later = [message(first, first | change, thread=receipt.thread) for change in changes]
    sent(alertmanager(peer.url), *later)

    labels, *others = (alert_of(request)["labels"] for request in peer.requests)

    assert others == [labels] * len(changes)


def test_alert_keeps_the_severity_of_its_route(peer: HttpPeer) -> None:
    short = {"EventType": "Freeze", "DurationInSeconds": 5}
    (first,) = sent(alertmanager(peer.url), message(short, severity="critical"))
    # the courier tells what the sink said of the first; what the routes of later changes say does
    # not matter
    later = (message(short, short | STARTED), message(short, short | STARTED, None))
    sent(
        alertmanager(peer.url),
        *(msgspec.structs.replace(one, thread=first.thread) for one in later),
    )

    assert {alert_of(request)["labels"]["severity"] for request in peer.requests} == {"critical"}


def test_more_severe_event_is_another_alert_and_ends_the_first(peer: HttpPeer) -> None:
    short = {"EventType": "Freeze", "DurationInSeconds": 5}
    longer = short | {"DurationInSeconds": 30}

    (first,) = sent(alertmanager(peer.url), message(short))
    (second,) = sent(alertmanager(peer.url), message(short, longer, thread=first.thread))
    sent(alertmanager(peer.url), message(short, longer, short, thread=second.thread))
    bodies = [json.loads(request.body) for request in peer.requests]
    severities = [[(one["labels"]["severity"], "endsAt" in one) for one in body] for body in bodies]

    # more severe, it is another alert, and the one before is over at once
    assert severities == [
        [("info", False)],
        [("warning", False), ("info", True)],
        [("warning", False)],
    ]


def test_alert_is_delivered_when_one_member_accepts() -> None:
    with HttpPeer() as one, HttpPeer() as two:
        two.default = Answer(500)
        sent(alertmanager("http://127.0.0.1:9", two.url, one.url))

        assert len(one.requests) == 1
        assert len(two.requests) == 1


def test_alert_fails_temporarily_when_no_member_accepts(peer: HttpPeer) -> None:
    peer.default = Answer(500)

    with pytest.raises(SendError, match=r"Connection refused.*; 500") as raised:
        sent(alertmanager("http://127.0.0.1:9", peer.url))

    assert not raised.value.permanent


def test_alert_is_not_refused_for_good_while_a_member_is_down(peer: HttpPeer) -> None:
    peer.default = Answer(400)

    with pytest.raises(SendError) as raised:
        sent(alertmanager("http://127.0.0.1:9", peer.url))

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

    request = peer.requests[0]

    assert request.headers["x-scope-orgid"] == "tenant-1"
    assert request.headers["authorization"] == "Bearer t"
    assert request.headers["content-type"] == "application/json"


def python(script: str, **fields: Any) -> SinkConfig:
    return SinkConfig(command=Command(command=(sys.executable, "-c", script), **fields))


def input_of_command(sent_message: Message, directory: Path) -> tuple[Any, dict[str, str]]:
    """Send a message to a command; return what its standard input and its environment were."""
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
    # without it, hardly a program of Windows starts
    monkeypatch.setenv("SYSTEMROOT", r"C:\Windows")
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
    assert "NOTBEFORE_EVENT_RESOURCES" not in environment  # never half a list of VMs


def test_texts_of_azure_are_not_executed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    evil = f"$(touch {out}); `touch {out}` && touch {out}\0"

    sent(python("pass"), message({"Description": evil, "Resources": [evil]}))

    assert not out.exists()


def test_last_output_of_a_command_is_the_cause_of_its_failure() -> None:
    with pytest.raises(SendError, match=r"exit code 3: x+ no such node"):
        sent(python("import sys; print('x' * 10**6); sys.exit(print('no such node') or 3)"))


def test_killed_command_is_a_temporary_failure() -> None:
    with pytest.raises(SendError, match="signal 9") as raised:
        sent(python("import os; os.kill(os.getpid(), 9)"))

    assert not raised.value.permanent  # the command did not end by itself


def test_command_and_its_children_end_at_the_timeout(tmp_path: Path) -> None:
    out = tmp_path / "pid"
    # a shell starts in less than its time
    command = (
        "/bin/sh",
        "-c",
        f"sleep 60 & echo $! > {out}; wait",
    )

    with pytest.raises(SendError, match="not done after 2 s") as raised:
        sent(SinkConfig(command=Command(command=command, timeout=Duration("2s"))))
    assert not raised.value.permanent

    pid = int(out.read_text(encoding="utf-8"))
    eventually(lambda: has_ended(pid))


@pytest.mark.parametrize(("code", "goes_on"), [(0, True), (75, False)])
def test_background_process_survives_a_successful_command(
    tmp_path: Path, code: int, *, goes_on: bool
) -> None:
    pid, go, out = (tmp_path / name for name in ("pid", "go", "out"))

    script = (
        f"(until [ -e {go} ]; do sleep 0.05; done; echo done > {out}) & echo $! > {pid}; exit"
        f" {code}"
    )

    with nullcontext() if goes_on else pytest.raises(SendError, match="exit code 75"):
        sent(SinkConfig(command=Command(command=("/bin/sh", "-c", script))))

    if not goes_on:
        eventually(lambda: has_ended(int(pid.read_text(encoding="utf-8"))))
    go.touch()
    if goes_on:
        eventually(out.exists)


def test_large_output_of_a_command_fills_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    script = (
        "import sys\nfor _ in range(2_000): sys.stdout.write('x' * 100_000)\nsys.exit(print('the"
        " last word') or 4)"
    )

    with pytest.raises(SendError, match=r"exit code 4: x+the last word"):
        sent(python(script, timeout=Duration("60s")))
    assert list(tmp_path.iterdir()) == []


def test_missing_command_is_refused_for_good() -> None:
    with pytest.raises(SendError, match="No such file") as raised:
        sent(SinkConfig(command=Command(command=("/no/such/command",))))
    assert raised.value.permanent


def test_apprise_sends_as_fast_as_the_receiver_takes_it(peer: HttpPeer) -> None:
    begun = time.monotonic()
    settings = Apprise(url=Secret(peer.url.replace("http://", "json://")))

    sent(SinkConfig(apprise=settings), *[message()] * 5)

    assert len(peer.requests) == 5
    assert time.monotonic() - begun < 20  # its own pauses would be 5.5 s each


def test_command_that_reads_nothing_until_its_timeout_leaves_no_pipe_open(
    recwarn: pytest.WarningsRecorder,
) -> None:
    for timeout in (0.0, 0.3):
        with pytest.raises(SendError, match="not done after"):
            run(["/bin/sleep", "60"], b"x" * 1_000_000, {}, timeout)

    gc.collect()
    assert not [one for one in recwarn if one.category is ResourceWarning]
