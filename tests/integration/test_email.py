"""E-mail, against a real SMTP server: TLS, passwords, refusals of the server and of single recipients."""

import email
import email.policy
import sys
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import pytest
import trustme
from apprise.plugins.email import NotifyEmail

from notbefore.config.messages import Messages
from notbefore.config.secret import Secret
from notbefore.config.sinks import Email, SinkConfig
from notbefore.core.duration import Duration
from notbefore.courier.sinks.email import account_of, read_url
from notbefore.errors import ConfigError, SendError
from support.azure import STARTED
from support.messages import message, sent, sink_of
from support.peers import MailPeer


def mail(content: bytes) -> EmailMessage:
    found = email.message_from_bytes(content, policy=email.policy.default)
    assert isinstance(found, EmailMessage)
    return found


def mailto(peer: MailPeer, query: str = "mode=insecure", user: str = "", scheme: str = "mailto", **fields: Any) -> Any:
    url = f"{scheme}://{user}localhost:{peer.port}?from=vm@example.org&{query}"
    settings = {"to": ("ops@example.org",), "timeout": Duration("5s"), **fields}
    return SinkConfig(email=Email(url=Secret(url), **settings))


def test_the_mails_of_one_event_are_one_thread(tmp_path: Path) -> None:
    with MailPeer(tmp_path) as peer:
        one, two, other = message(), message({}, STARTED), message({"EventId": "another"})
        sent(mailto(peer), one, two, other)
        first, second, stranger = (mail(content) for _, content in peer.mails)
    assert first["Message-ID"] == f"<{one.delivery_id}@notbefore.invalid>"
    assert first["Message-ID"] != second["Message-ID"]
    assert first["References"] == second["References"] != stranger["References"]
    assert first["Subject"].startswith("Freeze of WestNO_0 was due ")
    text, html = (part.get_content() for part in first.iter_parts())
    assert "Expected interruption: 5 s" in text
    assert "Runbook: https://wiki.example.org/r" in text
    assert "<td" in html
    assert first["From"] == "notbefore <vm@example.org>"
    assert first["Auto-Submitted"] == "auto-generated"
    for part in (text, html):
        assert f"Delivery: {one.delivery_id}" in part


def test_a_mail_has_the_reader_s_time(tmp_path: Path) -> None:
    with MailPeer(tmp_path) as peer:
        sink = sink_of(mailto(peer), Messages(time_zone="Asia/Kolkata"))
        sink.send(message())
        ((_, content),) = peer.mails
    found = mail(content)
    assert str(found["Date"]).endswith("+0530")
    for part in found.iter_parts():
        assert "2026-03-01 12:15:00 UTC (17:45:00 Asia/Kolkata)" in part.get_content()


def test_only_what_is_critical_and_not_over_is_urgent(tmp_path: Path) -> None:
    reboot = {"EventType": "Reboot"}
    with MailPeer(tmp_path) as peer:
        sent(mailto(peer), message(reboot), message(), message(reboot, reboot | STARTED, None))
        assert [mail(content)["X-Priority"] for _, content in peer.mails] == ["1", None, None]


def test_a_mail_is_one_mail_whatever_azure_says(tmp_path: Path) -> None:
    evil = "x\r\nBcc: eve@example.org\r\n.\r\n<script>alert(1)</script>"
    with MailPeer(tmp_path) as peer:
        sent(mailto(peer), message({"EventType": evil, "Description": evil, "Resources": [evil]}))
        ((recipients, content),) = peer.mails
    found = mail(content)
    assert recipients == ["ops@example.org"]
    assert found["Bcc"] is None
    assert "<script>" not in list(found.iter_parts())[1].get_content()


@pytest.mark.filterwarnings("ignore:Requiring AUTH while not requiring TLS")  # the whole connection is TLS
@pytest.mark.parametrize(("tls", "query"), [("starttls", "mode=starttls"), ("smtps", "mode=ssl")])
def test_mail_over_tls_with_a_password(tmp_path: Path, authority: trustme.CA, tls: str, query: str) -> None:
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    options: dict[str, Any] = {"query": query, "scheme": "mailtos", "ca_file": str(tmp_path / "ca.pem")}
    with MailPeer(tmp_path, tls=tls, password="right", authority=authority) as peer:
        sent(mailto(peer, user="me:right@", **options))
        assert len(peer.mails) == 1
        with pytest.raises(SendError, match="535") as raised:
            sent(mailto(peer, user="me:wrong@", **options))
        assert raised.value.permanent
        with pytest.raises(SendError, match="CERTIFICATE_VERIFY_FAILED"):
            sent(mailto(peer, user="me:right@", query=query, scheme="mailtos"))
        assert len(peer.mails) == 1


def test_who_has_the_mail_does_not_get_it_again(tmp_path: Path) -> None:
    with MailPeer(tmp_path) as peer:
        peer.refuse["late@example.org"] = "450 greylisted"
        sink = sink_of(mailto(peer, to=("ops@example.org", "late@example.org")))
        one = message()
        with pytest.raises(SendError, match="greylisted") as raised:
            sink.send(one)
        assert not raised.value.permanent
        peer.refuse.clear()
        sink.send(one)
    assert [recipients for recipients, _ in peer.mails] == [["ops@example.org"], ["late@example.org"]]


def test_who_is_refused_for_good_later_on_is_no_dead_letter_where_others_have_the_mail(tmp_path: Path) -> None:
    with MailPeer(tmp_path) as peer:
        peer.refuse["late@example.org"] = "450 greylisted"
        sink = sink_of(mailto(peer, to=("ops@example.org", "late@example.org")))
        one = message()
        with pytest.raises(SendError, match="greylisted"):
            sink.send(one)
        peer.refuse["late@example.org"] = "550 unknown"
        sink.send(one)
    assert [recipients for recipients, _ in peer.mails] == [["ops@example.org"]]


def test_what_the_server_says_to_quit_says_nothing_of_the_mail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def grumpy(_self: object, *_: object) -> str:
        return "421 go away"

    monkeypatch.setattr(MailPeer, "handle_QUIT", grumpy, raising=False)
    with MailPeer(tmp_path) as peer:
        sent(mailto(peer))
        assert len(peer.mails) == 1


def test_copies_are_sent_and_hidden_ones_stay_hidden(tmp_path: Path) -> None:
    with MailPeer(tmp_path) as peer:
        sent(mailto(peer, "mode=insecure&to=a@example.org&cc=b@example.org&bcc=c@example.org", to=()))
        ((recipients, content),) = peer.mails
    assert sorted(recipients) == ["a@example.org", "b@example.org", "c@example.org"]
    assert "c@example.org" not in mail(content)["To"]


def test_recipients_that_are_all_unknown_are_for_good_and_some_are_not(tmp_path: Path) -> None:
    with MailPeer(tmp_path) as peer:
        peer.refuse["ops@example.org"] = "550 unknown"
        with pytest.raises(SendError, match="550 unknown") as raised:
            sent(mailto(peer))
        assert raised.value.permanent
        sent(mailto(peer, to=("ops@example.org", "night@example.org")))
        assert [recipients for recipients, _ in peer.mails] == [["night@example.org"]]


def keys(peer: MailPeer, **fields: Any) -> SinkConfig:
    settings: dict[str, Any] = {"to": ("ops@example.org",), "sender": "vm@example.org", "tls": "none", **fields}
    return SinkConfig(email=Email(host="localhost", port=peer.port, timeout=Duration("5s"), **settings))


@pytest.mark.filterwarnings("ignore:Requiring AUTH while not requiring TLS")  # the whole connection is TLS
@pytest.mark.parametrize(("peer_tls", "tls"), [("starttls", "starttls"), ("smtps", "tls")])
def test_the_keys_say_the_same_as_an_address(tmp_path: Path, authority: trustme.CA, peer_tls: str, tls: str) -> None:
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    options: dict[str, Any] = {"tls": tls, "user": "me", "ca_file": str(tmp_path / "ca.pem")}
    with MailPeer(tmp_path, tls=peer_tls, password="right", authority=authority) as peer:
        sent(keys(peer, password=Secret("right"), **options))
        ((recipients, content),) = peer.mails
        with pytest.raises(SendError, match="535") as raised:
            sent(keys(peer, password=Secret("wrong"), **options))
    assert raised.value.permanent
    assert recipients == ["ops@example.org"]
    assert mail(content)["From"] == "notbefore <vm@example.org>"


def test_a_server_without_starttls_gets_nothing(tmp_path: Path) -> None:
    with MailPeer(tmp_path) as peer:
        with pytest.raises(SendError, match="STARTTLS") as raised:
            sent(keys(peer, tls="starttls"))
        assert peer.mails == []
    assert raised.value.permanent


@pytest.mark.parametrize(("reply", "permanent"), [("451 come again", False), ("421 too busy", False), ("554 no", True)])
def test_what_the_server_says_decides_whether_it_is_tried_again(tmp_path: Path, reply: str, *, permanent: bool) -> None:
    with MailPeer(tmp_path) as peer:
        peer.replies.append(reply)
        with pytest.raises(SendError, match=reply[:3]) as raised:
            sent(keys(peer))
        assert raised.value.permanent == permanent
        sent(keys(peer))
        assert len(peer.mails) == 1


@pytest.mark.parametrize(
    "url",
    [
        "mailtos://u:p@mail.example.org",
        "mailtos://u:p@mail.example.org:2525?mode=ssl",
        "mailto://mail.example.org?from=vm@example.org&to=a@b.org",
        "mailtos://me%40example.org:pass%20word@mail.example.org?from=x@y.org&to=a@b.org,c@d.org&cc=e@f.org&bcc=g@h.org",
        "mailtos://u:p@mail.example.org/a@b.org/c@d.org?name=x",
        "mailtos://u:p@example.org?smtp=relay.example.org&user=login&pass=word&from=x@y.org&to=a@b.org",
        "mailto://u:p@h.example.org?verify=no&mode=insecure",
        "mailtos://example.org?from=x@y.org&user=u&pass=p",
        "mailto://127.0.0.1:25?from=vm@example.org",
        "mailto://h.example.org?from=vm@example.org&to=Ops <ops@x.org>",
    ],
)
def test_an_address_means_what_it_means_to_apprise(url: str) -> None:
    theirs = NotifyEmail(**NotifyEmail.parse_url(url))  # type: ignore[no-untyped-call]
    ours = read_url(url)
    assert (ours.host, ours.port, ours.user, ours.password) == (
        theirs.smtp_host, theirs.port, theirs.user or "", theirs.password or "",
    )  # fmt: skip
    assert ours.tls == {"ssl": "tls", "insecure": "none", "starttls": "starttls"}[str(theirs.secure_mode)]
    assert sorted(ours.to) == sorted([*(address for _, address in theirs.targets), *theirs.cc])
    assert (set(ours.hidden), ours.sender, ours.verify) == (theirs.bcc, theirs.from_addr[1], theirs.verify_certificate)


def test_the_keys_of_the_sink_win_over_the_address() -> None:
    url = Secret("mailtos://u:p@h.example.org?from=a@b.org&to=c@d.org&bcc=e@f.org")
    account = account_of(Email(url=url, to=("ops@example.org",), sender="vm@example.org"))
    assert (account.to, account.hidden, account.sender) == (("ops@example.org",), (), "vm@example.org")


def test_no_password_is_sent_in_the_clear_unasked() -> None:
    with pytest.raises(ConfigError, match="unencrypted"):
        read_url("mailto://me:hunter2@mail.example.org")


def test_the_sink_needs_no_apprise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "apprise"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "apprise", None)  # an import of it fails
    with MailPeer(tmp_path) as peer:
        sent(mailto(peer))
        assert len(peer.mails) == 1


@pytest.mark.parametrize("url", ["json://localhost", "nonsense", "mailto://"])
def test_an_address_that_is_no_mail_address_says_what_is_expected(url: str) -> None:
    with pytest.raises(ConfigError, match="mail"):
        sink_of(SinkConfig(email=Email(url=Secret(url))))
