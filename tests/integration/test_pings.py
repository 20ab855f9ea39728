"""The dead man's switch: who is pinged, with what, when not, and what is said of a ping that does not arrive."""

import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import trustme
from google.protobuf.json_format import Parse
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

from notbefore.agent import pings
from notbefore.agent.pings import Pings, PingStatus
from notbefore.agent.unforeseen import UnforeseenErrors
from notbefore.config.model import Config, HeartbeatConfig
from notbefore.config.secret import Secret
from notbefore.config.sinks import OtlpConnection, SinkConfig, Webhook
from notbefore.core.duration import Duration
from support.agent import eventually
from support.azure import ID, ME, T0
from support.messages import VM
from support.peers import ConnectProxy, HttpPeer, Say

WELL = PingStatus(ok=True, line="1 event listed", vm=VM, listed=(ID,), now=T0)
ILL = msgspec.structs.replace(WELL, ok=False, line="the last good answer of IMDS is 99.0 s old")


@pytest.fixture
def peer() -> Iterator[HttpPeer]:
    with HttpPeer() as found:
        yield found


def config_of(sink: SinkConfig | None = None, url: str | None = None) -> Config:
    heartbeat = HeartbeatConfig(ping_url=Secret(url) if url else None, sink="hook" if sink else None)
    return Config(sinks={"hook": sink} if sink else {}, heartbeat=heartbeat)


def pinged(config: Config, status: PingStatus | None = WELL, times: int = 1) -> None:
    """So many rounds, without the waiting."""
    found = Pings(lambda: status, lambda: config, UnforeseenErrors())
    for _ in range(times):
        found._ping(60.0)


def webhook(peer: HttpPeer, **fields: Any) -> SinkConfig:
    return SinkConfig(webhook=Webhook(url=Secret(f"{peer.url}/hook"), **{"allow_private": True, **fields}))


def test_a_ping_says_that_the_agent_is_well_and_fail_that_it_is_not(peer: HttpPeer) -> None:
    config = config_of(url=f"{peer.url}/uuid?rid=1")
    pinged(config)
    pinged(config, ILL)
    pinged(config, None)
    well, ill = peer.requests
    assert (well.path, ill.path) == ("/uuid?rid=1", "/uuid/fail?rid=1")
    assert well.body.decode().endswith(f" on {ME}: 1 event listed\n")
    assert b"99.0 s old" in ill.body


def test_a_webhook_gets_the_heartbeat_signed_and_only_while_the_agent_is_well(peer: HttpPeer) -> None:
    config = config_of(webhook(peer, secret=Secret("k"), headers={"X-Key": Secret("h")}))
    pinged(config)
    pinged(config, ILL)
    pinged(config, msgspec.structs.replace(WELL, vm=None))
    (request,) = peer.requests
    values = json.loads(request.body)
    assert values["event.name"] == "notbefore.heartbeat"
    assert values["notbefore.heartbeat.interval_seconds"] == 60
    assert values["azure.scheduled_events.listed"] == [ID]
    assert values["host.name"] == ME
    assert request.headers["x-key"] == "h"
    assert request.headers["x-notbefore-signature"].startswith("t=")


def test_a_heartbeat_over_otlp_is_a_log_record_that_the_protocol_knows(peer: HttpPeer) -> None:
    settings = OtlpConnection(endpoint=peer.url, headers={"Api-Key": Secret("k")}, resource={"team": "x"})
    pinged(config_of(SinkConfig(otlp_logs=settings)))
    (request,) = peer.requests
    assert (request.path, request.headers["api-key"]) == ("/v1/logs", "k")
    found = Parse(request.body, ExportLogsServiceRequest()).resource_logs[0]
    resource = {one.key: one.value.string_value for one in found.resource.attributes}
    (record,) = found.scope_logs[0].log_records
    assert (resource["team"], resource["host.name"], resource["service.name"]) == ("x", ME, "notbefore")
    assert record.event_name == "notbefore.heartbeat"
    assert record.time_unix_nano == int(T0.timestamp()) * 10**9
    attributes = {one.key: one.value for one in record.attributes}
    assert attributes["azure.scheduled_events.pending"].int_value == 1
    assert attributes["azure.scheduled_events.listed"].array_value.values[0].string_value == ID


def test_what_does_not_arrive_is_logged_once_and_never_with_the_address(
    peer: HttpPeer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "notbefore")
    config = config_of(url=f"{peer.url}/secret-uuid")
    found = Pings(lambda: WELL, lambda: config, UnforeseenErrors())
    peer.answers.extend([Say(500), Say(500), Say(302, (("Location", f"{peer.url}/else"),)), Say(how="cut"), Say(200)])
    for _ in range(5):
        found._ping(60.0)
    assert caplog.messages[:2] == [
        "heartbeat: ping_url was not reached: 127.0.0.1 answers 500",
        "heartbeat: ping_url was not reached: 127.0.0.1 answers 302",
    ]
    assert caplog.messages[-1] == "heartbeat: ping_url is reached again"
    assert len(caplog.messages) == 4
    assert len(peer.requests) == 5  # no redirect was followed
    assert "secret" not in caplog.text


def test_nobody_there_and_a_secret_that_cannot_be_read_are_said_as_well(
    peer: HttpPeer, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    pinged(config_of(url="http://127.0.0.1:9/secret"))
    heartbeat = HeartbeatConfig(ping_url=Secret(str(tmp_path / "gone"), "file"))
    pinged(Config(heartbeat=heartbeat))
    pinged(config_of(webhook(peer, allow_private=False)))
    refused, unreadable, private = caplog.messages
    assert "Connection refused" in refused
    assert "gone" in unreadable
    assert "not a public address" in private
    assert not peer.requests


@pytest.mark.parametrize("place", ["/sec ret", "/secret\x07", "/secr\u00e9t", ":port/secret", "[/secret"])
def test_an_address_that_is_none_is_not_shown(peer: HttpPeer, caplog: pytest.LogCaptureFixture, place: str) -> None:
    pinged(config_of(url=f"{peer.url}{place}"))
    (said,) = caplog.messages
    assert said.startswith("heartbeat: ping_url was not reached: ")
    assert "ret" not in said
    assert not peer.requests


@pytest.mark.parametrize("how", ["drip_head", "hang"])
def test_who_drips_or_hangs_is_left(
    peer: HttpPeer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(pings, "PING_TIMEOUT", 1.0)
    peer.default = Say(how=how)
    pinged(config_of(url=peer.url))
    assert len(peer.requests) == 1
    (said,) = caplog.messages
    assert "in time" in said or "timed out" in said


def test_over_tls_only_who_is_known_is_pinged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    with HttpPeer(authority) as peer:
        pinged(config_of(url=f"{peer.url}/x"))
        assert not peer.requests
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "ca.pem"))
        pinged(config_of(url=f"{peer.url}/x"))
        monkeypatch.delenv("REQUESTS_CA_BUNDLE")
        pinged(config_of(webhook(peer, ca_file=str(tmp_path / "ca.pem"))))
        assert [request.path for request in peer.requests] == ["/x", "/hook"]


def test_a_ping_takes_the_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "ca.pem"))
    with HttpPeer(authority, "ping.example.org") as peer, ConnectProxy(peer.port) as proxy:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.port}")
        monkeypatch.setenv("no_proxy", "")
        pinged(config_of(url="https://ping.example.org/x"))
        assert proxy.asked == ["ping.example.org:443"]
        assert [request.path for request in peer.requests] == ["/x"]


def test_the_thread_pings_at_each_interval_and_a_reload_begins_and_ends_it(
    peer: HttpPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pings, "FIRST", 0.01)
    config: Any = Config()
    found = Pings(lambda: WELL, lambda: config, UnforeseenErrors())
    found.reconfigure()
    assert "pings" not in {thread.name for thread in threading.enumerate()}
    quick = SimpleNamespace(every=Duration("100ms"), ping_url=Secret(peer.url), sink=None)  # less than a user may set
    config = SimpleNamespace(heartbeat=quick, sinks={})
    found.reconfigure()
    eventually(lambda: len(peer.requests) >= 3)
    config = Config()
    found.reconfigure()
    settled = _settled(lambda: len(peer.requests))
    config = SimpleNamespace(heartbeat=quick, sinks={})
    found.reconfigure()
    eventually(lambda: len(peer.requests) > settled)
    found.stop()
    eventually(lambda: "pings" not in {thread.name for thread in threading.enumerate()})


def _settled(count: Callable[[], int]) -> int:
    """The count, once it has stood still for ten intervals."""
    while True:
        before = count()
        if not threading.Event().wait(1.0) and count() == before:
            return before
