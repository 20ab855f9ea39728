"""The dead man's switch: who is pinged, with what, when not, and what is said of a ping that does
not arrive.
"""

import logging
from pathlib import Path

import pytest

from notbefore.agent.pings import Pings
from notbefore.agent.thread_guard import ThreadGuard
from notbefore.agent.view import PingStatus
from notbefore.config.model import HeartbeatConfig
from notbefore.config.secret import Secret
from support.azure import ME
from support.peers import Answer, HttpPeer

BEGINS = PingStatus("start", "0 events listed; IMDS has given no valid answer yet", ME)
WELL = PingStatus("success", "1 event listed", ME)
ILL = PingStatus("fail", "the last good answer of IMDS is 99.0 s old", None)


def pinged(url: str, *statuses: PingStatus) -> None:
    """A ping of each status."""
    heartbeat = HeartbeatConfig(ping_url=Secret(url))
    left = list(statuses or [WELL])
    found = Pings(heartbeat, lambda: left.pop(0), ThreadGuard())
    for _ in range(len(left)):
        found.ping()


def test_ping_reports_start_success_and_failure(
    peer: HttpPeer,
) -> None:
    pinged(f"{peer.url}/uuid?rid=1", BEGINS, BEGINS, WELL, ILL)

    begins, well, ill = peer.requests

    assert [request.path for request in peer.requests] == [
        "/uuid/start?rid=1",
        "/uuid?rid=1",
        "/uuid/fail?rid=1",
    ]
    assert b"no valid answer yet" in begins.body
    # none waits in a connection that the receiver may close
    assert len({request.client for request in peer.requests}) == 3
    assert well.body.decode().endswith(f" on {ME}: 1 event listed\n")
    assert ill.body.decode().endswith(
        " on unknown VM: the last good answer of IMDS is 99.0 s old\n"
    )


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

    pinged(f"{peer.url}/secret-uuid", *[WELL] * 5)

    assert caplog.messages[:2] == [
        "heartbeat: ping_url was not reached: 127.0.0.1 answers 500",
        "heartbeat: ping_url was not reached: 127.0.0.1 answers 302",
    ]
    assert caplog.messages[-1] == "heartbeat: ping_url is reached again"
    assert len(caplog.messages) == 4
    assert len(peer.requests) == 5  # no redirect was followed
    assert "secret" not in caplog.text


def test_refused_connection_and_unreadable_secret_are_logged(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    pinged("http://127.0.0.1:9/secret")
    heartbeat = HeartbeatConfig(ping_url=Secret(str(tmp_path / "gone"), "file"))
    Pings(heartbeat, lambda: WELL, ThreadGuard()).ping()

    refused, unreadable = caplog.messages

    assert "Connection refused" in refused
    assert f"file is missing in {tmp_path}" in unreadable


@pytest.mark.parametrize("place", [":port/secret", "[/secret"])
def test_invalid_ping_url_is_not_logged(
    peer: HttpPeer, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    pinged(f"{peer.url}{place}")

    (line,) = caplog.messages

    assert line.startswith("heartbeat: ping_url was not reached: ")
    assert "ret" not in line
    assert not peer.requests
