"""E-mail over SMTP, with the standard library. All mails of one event are one thread.

Mail goes straight to the server that is configured: no proxy is used for it.
"""

import hashlib
import logging
import smtplib
import ssl
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from email.message import EmailMessage
from email.utils import format_datetime, formataddr, getaddresses, parseaddr
from html import escape
from typing import Final
from urllib.parse import parse_qs, unquote, urlsplit
from zoneinfo import ZoneInfo

from msgspec import Struct
from msgspec.structs import replace

from notbefore.config.messages import Messages
from notbefore.config.sinks import Email
from notbefore.courier.message import Asked, Message, Receipt
from notbefore.courier.render import Renderer
from notbefore.courier.wording import Text
from notbefore.errors import ConfigError, SendError

DOMAIN: Final = "notbefore.invalid"  # of message ids: a domain that cannot exist, RFC 2606
PERMANENT: Final = range(500, 600)  # SMTP replies that are final
ACCEPTED, FORWARDED = 250, 251  # ... and that accept a sender or a recipient
EXPECTED: Final = (
    "url: expected mailtos://USER:PASSWORD@HOST?from=vm@example.org&to=ops@example.org, or mailto://HOST?..."
)
REMEMBERED: Final = 100  # deliveries that some recipients have, and others do not have yet

log = logging.getLogger("notbefore.email")


class Sink:
    """A mail server, and the recipients."""

    def __init__(self, name: str, settings: Email, messages: Messages) -> None:
        self._name = name
        self._time_zone = messages.time_zone
        self._timeout = settings.timeout.seconds
        self._account = account_of(settings)
        self._render = Renderer(settings, messages)
        self._tls = ssl.create_default_context(cafile=settings.ca_file)
        if not self._account.verify:
            self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE
        self._accepted: dict[str, set[str]] = {}  # delivery -> recipients that have it already

    def send(self, message: Message) -> Receipt:
        """Send it; it is accepted when the server has accepted it for every recipient."""
        text = self._render(message)
        mail = compose(message, text, self._account, _now(self._time_zone))
        self._in_session(lambda server: self._transfer(server, mail, message.delivery_id))
        return Receipt(fallback=bool(text.trouble))

    def connect(self) -> Asked:
        """Log in, and name sender and recipients as for a mail; then take that back, so that none is sent."""
        self._in_session(self._ask)
        return Asked()

    def _ask(self, server: smtplib.SMTP) -> None:
        server.ehlo_or_helo_if_needed()
        code, said = server.mail(self._account.sender)
        if code != ACCEPTED:
            raise smtplib.SMTPSenderRefused(code, said, self._account.sender)
        answers = {address: server.rcpt(address) for address in (*self._account.to, *self._account.hidden)}
        server.rset()
        if refused := {address: said for address, said in answers.items() if said[0] not in (ACCEPTED, FORWARDED)}:
            raise _refused(refused)

    def _in_session(self, act: Callable[[smtplib.SMTP], None]) -> None:
        """Log in, act and log out; raises ``SendError``."""
        try:
            server = self._connected()
            try:
                act(server)
            finally:
                # not `with server`: its answer to QUIT says nothing about the mail
                with suppress(OSError, smtplib.SMTPException):
                    server.quit()
                server.close()
        except smtplib.SMTPResponseException as error:
            said = f"{error.smtp_code} {_words(error.smtp_error)}"
            raise SendError(f"the mail server says {said}", permanent=error.smtp_code in PERMANENT) from None
        except smtplib.SMTPNotSupportedError as error:
            raise SendError(f"the mail server cannot do this: {error}", permanent=True) from None
        except (smtplib.SMTPException, OSError) as error:
            raise SendError(f"{self._account.host}: {error.strerror or f'{type(error).__name__}: {error}'}") from None

    def _connected(self) -> smtplib.SMTP:
        account = self._account
        server: smtplib.SMTP
        if account.tls == "tls":
            server = smtplib.SMTP_SSL(account.host, account.port, timeout=self._timeout, context=self._tls)
        else:
            server = smtplib.SMTP(account.host, account.port, timeout=self._timeout)
        try:
            if account.tls == "starttls":
                server.starttls(context=self._tls)
            if account.user:
                server.login(account.user, account.password)
        except BaseException:
            with suppress(OSError, smtplib.SMTPException):
                server.close()
            raise
        return server

    def _transfer(self, server: smtplib.SMTP, mail: EmailMessage, delivery_id: str) -> None:
        done = self._accepted.setdefault(delivery_id, set())
        recipients = dict.fromkeys((*self._account.to, *self._account.hidden))
        missing = [address for address in recipients if address not in done]
        try:
            refused = server.send_message(mail, from_addr=self._account.sender, to_addrs=missing)
            done.update(address for address in missing if address not in refused)
        except smtplib.SMTPRecipientsRefused as answer:  # none of these; others may have it already
            refused = answer.recipients
        if not refused:
            del self._accepted[delivery_id]
        while len(self._accepted) > REMEMBERED:
            del self._accepted[next(iter(self._accepted))]
        if refused:
            error = _refused(refused)
            if error.permanent and done:  # the others have it, and these never will
                log.error("sink %s: some recipients were refused for good (%s)", self._name, error)
                return
            raise error

    def close(self) -> None:
        """Nothing is kept open."""


PORTS: Final = {"starttls": 587, "tls": 465, "none": 25}
_MODES: Final = {"starttls": "starttls", "ssl": "tls", "tls": "tls", "insecure": "none"}


class Account(Struct, frozen=True):
    """A mail server, the sender and the recipients."""

    host: str
    port: int
    tls: str  # starttls, tls, none
    sender: str
    to: tuple[str, ...]
    hidden: tuple[str, ...] = ()  # recipients whom the others do not see
    user: str = ""
    password: str = ""
    verify: bool = True  # the server's certificate


def account_of(settings: Email) -> Account:
    """The account that the settings name; raises ``ConfigError``."""
    if settings.url is not None:
        account = read_url(settings.url.reveal())
        if settings.to:
            account = replace(account, to=settings.to, hidden=())
        account = replace(account, sender=settings.sender or account.sender)
        if not account.sender or not account.to:
            raise ConfigError("expected a sender and recipients: give `from` and `to`, or ?from= and ?to= in the url")
        return account
    return Account(
        host=settings.host or "",
        port=settings.port or PORTS[settings.tls],
        tls=settings.tls,
        sender=settings.sender or "",
        to=settings.to,
        user=settings.user or "",
        password=settings.password.reveal() if settings.password is not None else "",
    )


def read_url(text: str) -> Account:
    """``mailtos://USER:PASSWORD@HOST:PORT?from=..&to=..``, with the names of apprise; raises ``ConfigError``."""
    try:
        url = urlsplit(text)
        port = url.port
    except ValueError:
        raise ConfigError(EXPECTED) from None
    given = {name: values[-1] for name, values in parse_qs(url.query.replace("+", "%2B")).items()}
    host = unquote(given.get("smtp") or url.hostname or "")
    tls = _MODES.get(given.get("mode", "starttls" if url.scheme == "mailtos" else "insecure"))
    if url.scheme not in ("mailto", "mailtos") or not host or tls is None:
        raise ConfigError(EXPECTED)
    user, password = given.get("user") or unquote(url.username or ""), given.get("pass") or unquote(url.password or "")
    if password and tls == "none" and "mode" not in given:
        raise ConfigError("the password would be sent unencrypted: write mailtos://, or allow it with mode=insecure")
    sender = given.get("from") or (user if "@" in user else f"{user}@{url.hostname}" if user else "")
    to = [*_addresses(given.get("to", "")), *(unquote(one) for one in url.path.split("/") if one)]
    return Account(
        host=host,
        port=port or PORTS[tls],
        tls=tls,
        sender=parseaddr(sender)[1],
        to=(*(to or _addresses(sender)), *_addresses(given.get("cc", ""))),
        hidden=tuple(_addresses(given.get("bcc", ""))),
        user=user,
        password=password,
        verify=given.get("verify", "yes").lower() not in ("no", "false", "0"),
    )


def _addresses(text: str) -> list[str]:
    return [address for _, address in getaddresses([text]) if address]


def _refused(refused: dict[str, tuple[int, bytes]]) -> SendError:
    said = "; ".join(f"{address}: {code} {_words(text)}" for address, (code, text) in sorted(refused.items()))
    return SendError(f"refused: {said}", permanent=all(code in PERMANENT for code, _ in refused.values()))


def _words(text: bytes | str) -> str:
    return " ".join((text.decode(errors="replace") if isinstance(text, bytes) else text).split())


def compose(message: Message, text: Text, account: Account, now: datetime) -> EmailMessage:
    """The mail: text and HTML. All mails of one event refer to the same root, so that they are one thread."""
    mail = EmailMessage()
    # a title is one line; EmailMessage would refuse another one, and not let it begin a header
    mail["Subject"] = text.title[:200]
    mail["From"] = formataddr(("notbefore", account.sender))
    mail["To"] = ", ".join(account.to)
    mail["Date"] = format_datetime(now)
    mail["Message-ID"] = f"<{message.delivery_id}@{DOMAIN}>"
    root = hashlib.sha256(f"{message.event_key}\n{message.sink}".encode()).hexdigest()[:32]
    mail["References"] = mail["In-Reply-To"] = f"<{root}@{DOMAIN}>"
    mail["Auto-Submitted"] = "auto-generated"  # RFC 3834: no absence note in return
    if message.shown_severity == "critical":
        mail["X-Priority"] = "1"
    mail.set_content(f"{text.plain}\n\n{text.footer}\n")
    mail.add_alternative(_html(text), subtype="html")
    return mail


def _now(time_zone: str | None) -> datetime:
    return datetime.now(ZoneInfo(time_zone) if time_zone is not None else UTC)


def _html(text: Text) -> str:
    inner = _paragraph(text.body) if text.body is not None else _built_in_html(text)
    links = " · ".join(f'<a href="{escape(link.value)}">{escape(link.name)}</a>' for link in text.links)
    return (
        '<!doctype html>\n<html><body style="font-family:sans-serif;font-size:14px">'
        f'<h2 style="font-size:18px">{escape(text.title)}</h2>\n{inner}\n<p>{links}</p>\n'
        f'<p style="color:#666;font-size:12px">Delivery: {text.delivery_id}</p></body></html>\n'
    )


def _built_in_html(text: Text) -> str:
    rows = "".join(
        f'<tr><td style="padding:2px 12px 2px 0;color:#666;vertical-align:top">{escape(fact.name)}</td>'
        f'<td style="padding:2px 0;vertical-align:top">{escape(fact.value)}</td></tr>\n'
        for fact in text.facts
    )
    advice = f"<p><b>What to do:</b> {_lines(text.advice)}</p>\n" if text.advice else ""
    return f"{_paragraph(text.summary)}\n{advice}<table>\n{rows}</table>"


def _paragraph(text: str) -> str:
    return f"<p>{_lines(text)}</p>" if text else ""


def _lines(text: str) -> str:
    return escape(text).replace("\n", "<br>\n")
