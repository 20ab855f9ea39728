"""E-mail, against a real SMTP server: TLS, passwords, refusals of the server and of single
recipients.
"""

import email
import email.policy
from collections.abc import Iterator
from contextlib import closing
from email.message import EmailMessage
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Literal

import pytest
import trustme
from axe_playwright_python.sync_playwright import Axe

from notbefore.config.secret import Secret
from notbefore.config.sinks import Email, Messages, SinkConfig
from notbefore.core.duration import Duration
from notbefore.core.text import without_mentions
from notbefore.errors import SendError
from support.azure import STARTED
from support.browser import PageLog, chromium
from support.messages import LINKS, message, sent, sink_of
from support.peers import MailPeer

REBOOT = {"EventType": "Reboot"}


@pytest.fixture
def peer() -> Iterator[MailPeer]:
    with MailPeer() as running:
        yield running


def mails(peer: MailPeer) -> list[EmailMessage]:
    """Return the mails that the server has accepted."""
    parsed: list[EmailMessage] = []
    for _, content in peer.mails:
        mail = email.message_from_bytes(content, policy=email.policy.default)
        assert isinstance(mail, EmailMessage)
        parsed.append(mail)
    return parsed


def recipients(peer: MailPeer) -> list[list[str]]:
    return [to for to, _ in peer.mails]


def mail_to(peer: MailPeer, **fields: Any) -> SinkConfig:
    settings: dict[str, Any] = {
        "to": ("ops@example.org",),
        "sender": "vm@example.org",
        "tls": "none",
        **fields,
    }
    return SinkConfig(
        email=Email(host="localhost", port=peer.port, timeout=Duration("60s"), **settings)
    )


def part(mail: EmailMessage, kind: str) -> str:
    """Return the content of a mail in one of its two forms: `plain` or `html`."""
    body = mail.get_body((kind,))
    assert body is not None
    content: str = body.get_content()
    return content


class Shown(HTMLParser):
    """The texts that an HTML page shows, and the elements with their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.elements: list[str] = []
        self.addresses: list[str] = []
        self.feed(page.partition("<body")[2])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("href", "src")]

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append(data.strip())


def test_mails_of_one_event_form_one_thread(peer: MailPeer) -> None:
    announced = message()
    started = message({}, STARTED)
    other_event = message({"EventId": "x"})

    sent(mail_to(peer), announced, started, other_event)

    first, second, stranger = mails(peer)
    assert first["Subject"] == "Freeze of WestNO_0"
    assert second["Subject"] == "Re: Freeze of WestNO_0"
    assert first["Thread-Topic"] == second["Thread-Topic"] == "Freeze of WestNO_0"
    assert first["References"] == first["In-Reply-To"] == second["References"]
    assert first["References"] != stranger["References"]
    assert first["Message-ID"] == f"<{announced.delivery_id}@notbefore.invalid>"
    assert first["Message-ID"] != second["Message-ID"]


def test_mail_about_an_event_without_notice_opens_its_thread(peer: MailPeer) -> None:
    sent(mail_to(peer), message(STARTED))

    (mail,) = mails(peer)
    assert mail["Subject"] == "Freeze of WestNO_0"


def test_no_text_starts_another_header(peer: MailPeer) -> None:
    evil = message({"EventType": "=?utf8?q?x=0ABcc:y?="})

    sent(mail_to(peer, sender="vm@m\u00fcller.example"), message(), evil)

    plain, hostile = mails(peer)
    assert plain["From"] == "notbefore <vm@m\u00fcller.example>"
    assert plain["Auto-Submitted"] == "auto-generated"
    assert hostile.keys() == plain.keys()


def test_html_has_the_content_of_the_text(peer: MailPeer) -> None:
    sent(mail_to(peer), message())

    (mail,) = mails(peer)
    assert mail.get_content_type() == "multipart/alternative"
    assert [each.get_content_type() for each in mail.iter_parts()] == ["text/plain", "text/html"]
    html = Shown(part(mail, "html"))
    words = " ".join(html.texts)
    for line in filter(None, part(mail, "plain").splitlines()):
        name, colon, value = line.partition(": ")
        if colon and value in html.addresses:  # a link: its name is shown
            assert name in words
        elif colon and name != "Delivery":
            assert value in words
            assert name in words
        else:
            assert line in words
    assert html.addresses == ["https://grafana.example.org/d/x?a=1&b=2", LINKS.runbook]


def test_html_shows_texts_from_azure_as_text(peer: MailPeer) -> None:
    evil = '<script>alert(1)</script><img src=x onerror=alert(1)> & "quoted" ${title}'

    sent(mail_to(peer), message({"Description": evil, "EventType": "<b>", "Resources": ["$title"]}))

    (mail,) = mails(peer)
    html = Shown(part(mail, "html"))
    assert without_mentions(evil) in html.texts
    assert without_mentions("<b> of $title in 14 min") in html.texts
    assert {"script", "img", "b"}.isdisjoint(html.elements)


def test_advice_keeps_its_lines_in_html(peer: MailPeer) -> None:
    messages = Messages(advice={"Freeze": "Drain the node:\nkubectl drain NODE"})

    with closing(sink_of(mail_to(peer), messages)) as sink:
        sink.send(message())

    (mail,) = mails(peer)
    assert "Drain the node:<br>kubectl drain NODE" in part(mail, "html")


def test_times_are_in_the_configured_zone_in_text_and_html(peer: MailPeer) -> None:
    with closing(sink_of(mail_to(peer), Messages(time_zone="Europe/Berlin"))) as sink:
        sink.send(message())

    (mail,) = mails(peer)
    for kind in ("plain", "html"):
        assert "2026-03-01 13:15:00 CET (12:15:00 UTC), in 14 min" in part(mail, kind)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_html_is_readable_without_pictures_on_a_phone(
    peer: MailPeer, scheme: Literal["light", "dark"]
) -> None:
    sent(mail_to(peer), message({"Resources": [f"a-long-name-of-a-vm-{n}" for n in range(20)]}))
    (mail,) = mails(peer)

    with chromium() as browser:
        page = browser.new_page(color_scheme=scheme, viewport={"width": 320, "height": 600})
        log = PageLog(page)
        page.set_content(part(mail, "html"))
        width = page.evaluate("document.documentElement.scrollWidth")
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        # axe takes the background of the browser for white, also in a dark one
        page.add_style_tag(content="body { background: Canvas }")
        contrast = Axe().run(page, options={"runOnly": ["color-contrast"]})

    assert width == 320
    assert contrast.violations_count == 0, contrast.generate_report()
    assert log.requests == []
    assert log.complaints == []
    assert background == "rgba(0, 0, 0, 0)"  # the mail program's own


# the whole connection is TLS
@pytest.mark.filterwarnings("ignore:Requiring AUTH while not requiring TLS")
@pytest.mark.parametrize(("peer_tls", "tls"), [("starttls", "starttls"), ("smtps", "tls")])
def test_mail_over_tls_with_a_password(
    tmp_path: Path, authority: trustme.CA, peer_tls: str, tls: str
) -> None:
    ca_file = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(ca_file)
    with MailPeer(tls=peer_tls, password="p w?", authority=authority) as peer:
        login = {"tls": tls, "user": "me@x", "password": Secret("p w?")}

        sent(mail_to(peer, **login, ca_file=str(ca_file)))

        assert len(peer.mails) == 1


# the whole connection is TLS
@pytest.mark.filterwarnings("ignore:Requiring AUTH while not requiring TLS")
@pytest.mark.parametrize(("peer_tls", "tls"), [("starttls", "starttls"), ("smtps", "tls")])
def test_mail_with_a_wrong_password_waits_for_the_operator(
    tmp_path: Path, authority: trustme.CA, peer_tls: str, tls: str
) -> None:
    ca_file = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(ca_file)
    with MailPeer(tls=peer_tls, password="p w?", authority=authority) as peer:
        login = {"tls": tls, "user": "me@x", "password": Secret("wrong")}

        with pytest.raises(SendError, match="535") as raised:
            sent(mail_to(peer, **login, ca_file=str(ca_file)))

        assert not raised.value.permanent
        assert raised.value.by_hand
        assert peer.mails == []


# the whole connection is TLS
@pytest.mark.filterwarnings("ignore:Requiring AUTH while not requiring TLS")
@pytest.mark.parametrize(("peer_tls", "tls"), [("starttls", "starttls"), ("smtps", "tls")])
def test_mail_is_not_sent_to_an_untrusted_server(
    authority: trustme.CA, peer_tls: str, tls: str
) -> None:
    with MailPeer(tls=peer_tls, password="p w?", authority=authority) as peer:
        login = {"tls": tls, "user": "me@x", "password": Secret("p w?")}

        with pytest.raises(SendError, match="CERTIFICATE_VERIFY_FAILED"):
            sent(mail_to(peer, **login))

        assert peer.mails == []


def test_mail_is_delivered_when_the_server_refuses_quit(
    peer: MailPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse_quit(_self: object, *_: object) -> str:
        return "421 go away"

    monkeypatch.setattr(MailPeer, "handle_QUIT", refuse_quit, raising=False)

    sent(mail_to(peer))

    assert len(peer.mails) == 1


@pytest.mark.parametrize(("answer", "permanent"), [("550 unknown", True), ("452 full", False)])
def test_mail_fails_when_its_only_recipient_is_refused(
    peer: MailPeer, answer: str, *, permanent: bool
) -> None:
    peer.refuse["ops@example.org"] = answer

    with pytest.raises(SendError, match=answer) as raised:
        sent(mail_to(peer))

    assert raised.value.permanent == permanent


@pytest.mark.parametrize("answer", ["550 unknown", "452 full"])
def test_refused_recipient_does_not_delay_the_others(peer: MailPeer, answer: str) -> None:
    peer.refuse["ops@example.org"] = answer

    sent(mail_to(peer, to=("ops@example.org", "night@example.org")))

    assert recipients(peer) == [["night@example.org"]]


def test_server_without_starttls_gets_nothing(peer: MailPeer) -> None:
    with pytest.raises(SendError, match="STARTTLS") as raised:
        sent(mail_to(peer, tls="starttls"))

    assert peer.mails == []
    assert raised.value.permanent
