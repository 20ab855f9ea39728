"""E-mail: the server, the account and the recipients are an apprise address (``mailto://``, ``mailtos://``).

apprise reads the address; the mail is made and sent with the standard library, which says for each refusal whether it
is for good, and lets all mails of one event be one thread.
"""

import hashlib
import logging
import smtplib
import ssl
from contextlib import suppress
from datetime import UTC, datetime
from email.message import EmailMessage
from email.utils import format_datetime, formataddr, parseaddr
from html import escape
from typing import Any, Final

from notbefore.config.sinks import Email, Links
from notbefore.delivery.message import Message, Receipt
from notbefore.delivery.render import Renderer, Text
from notbefore.errors import ConfigError, SendError

DOMAIN: Final = "notbefore.invalid"  # of message ids: it is nobody's, RFC 2606
PERMANENT: Final = range(500, 600)  # SMTP replies that would be the same tomorrow
REMEMBERED: Final = 100  # deliveries of which some recipients have theirs, and others do not yet

log = logging.getLogger("notbefore.email")


class Sink:
    """A mail server and who is written to."""

    def __init__(self, name: str, settings: Email, links: Links) -> None:
        self._name = name
        self._links = links
        self._timeout = settings.timeout.seconds
        self._account = _account(settings.url.reveal())
        hidden = [*sorted(self._account.cc), *sorted(self._account.bcc)]
        self._recipients = list(settings.to) or [*(address for _, address in self._account.targets), *hidden]
        self._shown = [address for address in self._recipients if address not in self._account.bcc]
        if not self._recipients:
            raise ConfigError("there is no recipient: give `to`, or ?to= in the address")
        self._sender = settings.sender or self._account.from_addr[1]
        self._render = Renderer(settings.title, settings.body, str)
        self._tls = ssl.create_default_context(cafile=settings.ca_file)
        if not self._account.verify_certificate:
            self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE
        self._accepted: dict[str, set[str]] = {}  # delivery -> recipients that have it already

    def send(self, message: Message) -> Receipt:
        """Hand it to the server; accepted is when it has taken it for every recipient."""
        text = self._render(message)
        mail = compose(message, text, (self._sender, self._shown), self._links)
        try:
            server = self._connected()
            try:
                self._hand_over(server, mail, message.delivery_id)
            finally:
                # not `with server`: what it says to QUIT says nothing of the mail
                with suppress(OSError, smtplib.SMTPException):
                    server.quit()
                server.close()
        except smtplib.SMTPResponseException as error:
            said = f"{error.smtp_code} {_words(error.smtp_error)}"
            raise SendError(f"the mail server says {said}", permanent=error.smtp_code in PERMANENT) from None
        except smtplib.SMTPNotSupportedError as error:
            raise SendError(f"the mail server cannot do this: {error}", permanent=True) from None
        except (smtplib.SMTPException, OSError) as error:
            raise SendError(f"{self._account.smtp_host}: {type(error).__name__}: {error}") from None
        return Receipt(fallback=text.fallback)

    def _connected(self) -> smtplib.SMTP:
        account = self._account
        server: smtplib.SMTP
        if account.secure_mode == "ssl":
            server = smtplib.SMTP_SSL(account.smtp_host, account.port, timeout=self._timeout, context=self._tls)
        else:
            server = smtplib.SMTP(account.smtp_host, account.port, timeout=self._timeout)
        try:
            if account.secure_mode == "starttls":
                server.starttls(context=self._tls)
            if account.user and account.password:
                server.login(account.user, account.password)
        except BaseException:
            with suppress(OSError, smtplib.SMTPException):
                server.close()
            raise
        return server

    def _hand_over(self, server: smtplib.SMTP, mail: EmailMessage, delivery_id: str) -> None:
        done = self._accepted.setdefault(delivery_id, set())
        missing = [address for address in self._recipients if address not in done]
        try:
            refused = server.send_message(mail, from_addr=self._sender, to_addrs=missing)
            done.update(address for address in missing if address not in refused)
        except smtplib.SMTPRecipientsRefused as answer:  # none of them has it; others may, of an earlier attempt
            refused = answer.recipients
        if not refused:
            del self._accepted[delivery_id]
        while len(self._accepted) > REMEMBERED:
            del self._accepted[next(iter(self._accepted))]
        if refused:
            error = _refused(refused)
            if error.permanent and done:  # the others have it, and these never will
                log.error("sink %s: some recipients are refused for good (%s)", self._name, error)
                return
            raise error

    def close(self) -> None:
        """Nothing is kept open."""


def _account(url: str) -> Any:
    from apprise.plugins.email import NotifyEmail  # noqa: PLC0415 - half a second that only mail needs

    settings = NotifyEmail.parse_url(url)  # type: ignore[no-untyped-call] # ships no types here
    if settings is None or settings.get("schema") not in ("mailto", "mailtos"):
        raise ConfigError("expected an address such as mailtos://user:password@mail.example.org?to=ops@example.org")
    try:
        return NotifyEmail(**settings)  # type: ignore[no-untyped-call]  # apprise has no types
    except TypeError as error:  # what apprise raises for an address that it cannot use
        raise ConfigError(f"apprise cannot use this mail address: {error}") from None


def _refused(refused: dict[str, tuple[int, bytes]]) -> SendError:
    said = "; ".join(f"{address}: {code} {_words(text)}" for address, (code, text) in sorted(refused.items()))
    return SendError(f"refused: {said}", permanent=all(code in PERMANENT for code, _ in refused.values()))


def _words(text: bytes | str) -> str:
    return " ".join((text.decode(errors="replace") if isinstance(text, bytes) else text).split())


def compose(message: Message, text: Text, ends: tuple[str, list[str]], links: Links) -> EmailMessage:
    """The mail: text and HTML. All mails of one event refer to the same root, so that they are one thread."""
    sender, recipients = ends
    mail = EmailMessage()
    # a title is one line; were it not, EmailMessage would refuse it rather than begin another header
    mail["Subject"] = text.title[:200]
    mail["From"] = formataddr(("notbefore", parseaddr(sender)[1]))
    mail["To"] = ", ".join(recipients)
    mail["Date"] = format_datetime(datetime.now(UTC))
    mail["Message-ID"] = f"<{message.delivery_id}@{DOMAIN}>"
    root = hashlib.sha256(f"{message.event_key}\n{message.sink}".encode()).hexdigest()[:32]
    mail["References"] = mail["In-Reply-To"] = f"<{root}@{DOMAIN}>"
    mail["Auto-Submitted"] = "auto-generated"  # RFC 3834: no absence note in return
    if message.severity == "critical" and not message.over:
        mail["X-Priority"] = "1"
    leads = [(name, link) for name, link in (("Dashboard", links.dashboard), ("Runbook", links.runbook)) if link]
    footer = "".join(f"\n{name}: {link}" for name, link in leads)
    mail.set_content(text.plain + ("\n" + footer if footer else "") + "\n")
    mail.add_alternative(_html(text, leads), subtype="html")
    return mail


def _html(text: Text, leads: list[tuple[str, str]]) -> str:
    if text.body is not None:
        inner = f"<p>{escape(text.body)}</p>".replace("\n", "<br>\n")
    else:
        rows = "".join(
            f'<tr><td style="padding:2px 12px 2px 0;color:#666;vertical-align:top">{escape(fact.name)}</td>'
            f'<td style="padding:2px 0">{escape(fact.value)}</td></tr>\n'
            for fact in text.facts
        )
        inner = f"<p>{escape(text.meaning)}</p>\n<table>\n{rows}</table>"
    links = " · ".join(f'<a href="{escape(link)}">{name}</a>' for name, link in leads)
    return (
        '<html><body style="font-family:sans-serif;font-size:14px">'
        f'<h2 style="font-size:18px">{escape(text.title)}</h2>\n{inner}\n<p>{links}</p></body></html>\n'
    )
