"""The pings of the heartbeat: their addresses, their bodies, and the log lines of failed pings."""

import logging
from pathlib import Path

import pytest

from notbefore.agent import pings as pings_module
from notbefore.agent.pings import Pings
from notbefore.agent.thread_guard import ThreadGuard
from notbefore.agent.view import PingStatus
from notbefore.config.model import HeartbeatConfig
from notbefore.config.secret import Secret
from support.agent import NOWHERE, PATIENCE
from support.azure import ME
from support.peers import Answer, HttpPeer

BEGINS = PingStatus("start", "0 events listed; IMDS has given no valid answer yet", ME)
WELL = PingStatus("success", "1 event listed", ME)
ILL = PingStatus("fail", "the last good answer of IMDS is 99.0 s old", None)


@pytest.fixture(autouse=True)
def _a_slow_receiver_has_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pings_module, "PING_TIMEOUT", PATIENCE)


def ping(url: Secret, *statuses: PingStatus) -> None:
    """Ping once with each status."""
    pings = Pings(HeartbeatConfig(ping_url=url), iter(statuses).__next__, ThreadGuard())
    for _ in statuses:
        pings.ping()


def test_ping_reports_start_success_and_failure(peer: HttpPeer) -> None:
    ping(Secret(f"{peer.url}/uuid?rid=1"), BEGINS, BEGINS, WELL, ILL)

    begins, well, ill = peer.requests
    assert begins.path == "/uuid/start?rid=1"
    assert well.path == "/uuid?rid=1"
    assert ill.path == "/uuid/fail?rid=1"
    assert b"no valid answer yet" in begins.body
    assert well.body.decode().endswith(f" on {ME}: 1 event listed\n")
    assert ill.body.decode().endswith(
        " on unknown VM: the last good answer of IMDS is 99.0 s old\n"
    )


def test_each_ping_has_its_own_connection(peer: HttpPeer) -> None:
    ping(Secret(peer.url), WELL, WELL, WELL)

    assert len({request.client for request in peer.requests}) == 3


def test_failed_pings_are_logged_once_without_the_address(
    peer: HttpPeer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "notbefore")
    peer.answers.extend(
        [
            Answer(500),
            Answer(500),
            Answer(302, (("Location", f"{peer.url}/else"),)),
            Answer(how="cut"),
            Answer(200),
        ]
    )

    ping(Secret(f"{peer.url}/secret-uuid"), *[WELL] * 5)

    assert caplog.messages[:2] == [
        "heartbeat: ping_url was not reached: 127.0.0.1 answers 500",
        "heartbeat: ping_url was not reached: 127.0.0.1 answers 302",
    ]
    assert caplog.messages[-1] == "heartbeat: ping_url is reached again"
    assert len(caplog.messages) == 4
    assert len(peer.requests) == 5  # no redirect was followed
    assert "secret" not in caplog.text


def test_refused_connection_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    ping(Secret(f"{NOWHERE}/secret"), WELL)

    (line,) = caplog.messages
    assert "Connection refused" in line


def test_unreadable_secret_is_logged(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    ping(Secret(str(tmp_path / "missing"), "file"), WELL)

    (line,) = caplog.messages
    assert f"file is missing in {tmp_path}" in line


@pytest.mark.parametrize("place", [":port/secret", "[/secret"])
def test_invalid_ping_url_is_not_logged(
    peer: HttpPeer, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    ping(Secret(f"{peer.url}{place}"), WELL)

    (line,) = caplog.messages
    assert line.startswith("heartbeat: ping_url was not reached: ")
    assert "ret" not in line
    assert not peer.requests
