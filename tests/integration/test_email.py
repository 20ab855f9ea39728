"""E-mail, against a real SMTP server: TLS, passwords, refusals of the server and of single
recipients.
"""

import email
import email.policy
from collections.abc import Iterator
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import pytest
import trustme

from notbefore.config.secret import Secret
from notbefore.config.sinks import Email, SinkConfig
from notbefore.core.duration import Duration
from notbefore.errors import SendError
from support.azure import STARTED
from support.messages import message, sent
from support.peers import MailPeer

REBOOT = {"EventType": "Reboot"}


@pytest.fixture
def peer() -> Iterator[MailPeer]:
    with MailPeer() as found:
        yield found


def mails(peer: MailPeer) -> list[EmailMessage]:
    found = [
        email.message_from_bytes(content, policy=email.policy.default) for _, content in peer.mails
    ]
    return [one for one in found if isinstance(one, EmailMessage)]


def recipients(peer: MailPeer) -> list[list[str]]:
    return [to for to, _ in peer.mails]


def keys(peer: MailPeer, **fields: Any) -> SinkConfig:
    settings: dict[str, Any] = {
        "to": ("ops@example.org",),
        "sender": "vm@example.org",
        "tls": "none",
        **fields,
    }
    return SinkConfig(
        email=Email(host="localhost", port=peer.port, timeout=Duration("60s"), **settings)
    )


def test_mails_of_one_event_form_one_thread(peer: MailPeer) -> None:
    one = message()
    two = message({}, STARTED)
    other = message({"EventId": "x", "EventType": "=?utf8?q?x=0ABcc:y?="})
    sent(keys(peer, sender="vm@m\u00fcller.example"), one, two, other)
    first, second, stranger = mails(peer)

    assert first["Message-ID"] == f"<{one.delivery_id}@notbefore.invalid>"
    assert first["Message-ID"] != second["Message-ID"]
    assert first["References"] == second["References"] != stranger["References"]
    assert first["Subject"] == "Freeze of WestNO_0 in 14 min"

    text = first.get_content()

    assert "Runbook: https://wiki.example.org/r" in text
    assert first["From"] == "notbefore <vm@m\u00fcller.example>"
    assert stranger.keys() == first.keys()  # no text starts another header
    assert first["Auto-Submitted"] == "auto-generated"
    assert f"Delivery: {one.delivery_id}" in text


# the whole connection is TLS
@pytest.mark.filterwarnings("ignore:Requiring AUTH while not requiring TLS")
@pytest.mark.parametrize(("peer_tls", "tls"), [("starttls", "starttls"), ("smtps", "tls")])
def test_mail_over_tls_with_a_password(
    tmp_path: Path, authority: trustme.CA, peer_tls: str, tls: str
) -> None:
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    ca_file = {"ca_file": str(tmp_path / "ca.pem")}
    login = {"tls": tls, "user": "me@x", "password": Secret("p w?")}
    with MailPeer(tls=peer_tls, password="p w?", authority=authority) as peer:
        sent(keys(peer, **login, **ca_file))

        with pytest.raises(SendError, match="535") as raised:
            sent(keys(peer, **login | {"password": Secret("wrong")}, **ca_file))
        assert not raised.value.permanent
        assert raised.value.by_hand
        with pytest.raises(SendError, match="CERTIFICATE_VERIFY_FAILED"):
            sent(keys(peer, **login))
        assert len(peer.mails) == 1


def test_mail_is_delivered_when_the_server_refuses_quit(
    peer: MailPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def grumpy(_self: object, *_: object) -> str:
        return "421 go away"

    monkeypatch.setattr(MailPeer, "handle_QUIT", grumpy, raising=False)
    sent(keys(peer))

    assert len(peer.mails) == 1


@pytest.mark.parametrize(("answer", "permanent"), [("550 unknown", True), ("452 full", False)])
def test_refused_recipient_does_not_delay_the_others(
    peer: MailPeer, answer: str, *, permanent: bool
) -> None:
    peer.refuse["ops@example.org"] = answer
    with pytest.raises(SendError, match=answer) as raised:
        sent(keys(peer))
    assert raised.value.permanent == permanent

    sent(keys(peer, to=("ops@example.org", "night@example.org")))
    assert recipients(peer) == [["night@example.org"]]


def test_server_without_starttls_gets_nothing(peer: MailPeer) -> None:
    with pytest.raises(SendError, match="STARTTLS") as raised:
        sent(keys(peer, tls="starttls"))
    assert peer.mails == []
    assert raised.value.permanent
