"""E-mail over SMTP, as text and HTML. All mails of one event are one thread.

It connects to the configured server directly, never through a proxy.
"""

import hashlib
import logging
import smtplib
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from email.message import EmailMessage
from email.utils import format_datetime
from typing import Final

from notbefore.config.sinks import Email, Messages
from notbefore.core.message import Message
from notbefore.courier.html_mail import html_of
from notbefore.courier.sink import Receipt
from notbefore.courier.sink import Sink as BaseSink
from notbefore.errors import SendError
from notbefore.wording.colors import color_of
from notbefore.wording.texts import Text, text_of

DOMAIN: Final = "notbefore.invalid"  # of message ids: a domain that cannot exist, RFC 2606
MAX_SUBJECT: Final = 200  # characters
PORTS: Final = {"starttls": 587, "tls": 465, "none": 25}
PERMANENT_REPLIES: Final = range(500, 600)  # SMTP replies that are permanent errors

log = logging.getLogger("notbefore.email")


class Sink(BaseSink):
    """A mail server, and the recipients."""

    def __init__(self, name: str, settings: Email, messages: Messages) -> None:
        self._name = name
        self._account = settings
        self._messages = messages
        self._tls = ssl.create_default_context(cafile=settings.ca_file)

    def send(self, message: Message) -> Receipt:
        """Send a mail. It is accepted if the server accepts it for at least one recipient."""
        mail = compose(message, text_of(message, self._messages), self._account)
        with self._session() as server:
            _transfer(server, mail, self._account, self._name)
        return Receipt()

    @contextmanager
    def _session(self) -> Iterator[smtplib.SMTP]:
        """Connect and log in.

        Errors of SMTP and of the network, also inside the block, are raised as ``SendError``.
        """
        try:
            server = self._connect()
            try:
                self._log_in(server)
                yield server
                # the answer to QUIT does not matter for the mail
                with suppress(OSError, smtplib.SMTPException):
                    server.quit()
            finally:
                server.close()
        except (smtplib.SMTPException, OSError) as error:
            raise _send_error(error, self._account.host) from None

    def _connect(self) -> smtplib.SMTP:
        account = self._account
        port = account.port or PORTS[account.tls]
        timeout = account.timeout.seconds
        if account.tls == "tls":
            return smtplib.SMTP_SSL(account.host, port, timeout=timeout, context=self._tls)
        return smtplib.SMTP(account.host, port, timeout=timeout)

    def _log_in(self, server: smtplib.SMTP) -> None:
        account = self._account
        if account.tls == "starttls":
            server.starttls(context=self._tls)
        if account.user and account.password is not None:
            server.login(account.user, account.password.reveal())


def _send_error(error: smtplib.SMTPException | OSError, host: str) -> SendError:
    if isinstance(error, smtplib.SMTPResponseException):
        reply = f"{error.smtp_code} {_words(error.smtp_error)}"
        # the password may be corrected
        is_login = isinstance(error, smtplib.SMTPAuthenticationError)
        permanent = error.smtp_code in PERMANENT_REPLIES and not is_login
        return SendError(f"the mail server answered {reply}", permanent=permanent, by_hand=is_login)
    if isinstance(error, smtplib.SMTPNotSupportedError):
        return SendError(f"the mail server does not support this: {error}", permanent=True)
    cause = error.strerror or f"{type(error).__name__}: {error}"
    return SendError(f"{host}: {cause}")


def _transfer(server: smtplib.SMTP, mail: EmailMessage, account: Email, name: str) -> None:
    """Send the mail. Raise ``SendError`` if all recipients are refused; log it if some are."""
    recipients = list(dict.fromkeys(account.to))
    try:
        refused = server.send_message(mail, from_addr=account.sender, to_addrs=recipients)
    except smtplib.SMTPRecipientsRefused as error:
        refused = error.recipients
    if not refused:
        return

    replies: list[str] = []
    for address, (code, text) in sorted(refused.items()):
        replies.append(f"{address}: {code} {_words(text)}")
    listed = "; ".join(replies)
    if len(refused) == len(recipients):
        permanent = all(code in PERMANENT_REPLIES for code, _ in refused.values())
        raise SendError(f"refused: {listed}", permanent=permanent)
    # the others have the mail: they must neither get it again nor wait for these
    log.error("sink %s: some recipients were refused, and do not get this mail (%s)", name, listed)


def _words(text: bytes | str) -> str:
    """Return the text of a reply on one line."""
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    return " ".join(text.split())


def compose(message: Message, text: Text, account: Email) -> EmailMessage:
    """Return the mail, as text and as HTML.

    All mails of one event have the same subject and refer to the same root, so that they are one
    thread. Gmail asks for both, Outlook reads the topic, and Thunderbird the root.
    """
    mail = EmailMessage()
    # a topic is one line, but EmailMessage decodes what follows "=?". A line end in that could
    # start another header
    topic = text.topic[:MAX_SUBJECT].replace("=?", "= ?")
    if _opens_thread(message):
        mail["Subject"] = topic
    else:
        mail["Subject"] = f"Re: {topic}"
    mail["Thread-Topic"] = topic
    mail["From"] = f"notbefore <{account.sender}>"
    mail["To"] = ", ".join(account.to)
    mail["Date"] = format_datetime(message.now)
    mail["Message-ID"] = f"<{message.delivery_id}@{DOMAIN}>"
    root = hashlib.sha256(f"{message.event_key}\n{message.sink}".encode()).hexdigest()[:32]
    mail["References"] = f"<{root}@{DOMAIN}>"
    mail["In-Reply-To"] = f"<{root}@{DOMAIN}>"
    mail["Auto-Submitted"] = "auto-generated"  # RFC 3834: no automatic reply to it
    mail.set_content(f"{text.title}\n\n{text.whole}\n")
    mail.add_alternative(html_of(text, color_of(message)), subtype="html")
    return mail


def _opens_thread(message: Message) -> bool:
    """Whether it is the first message of its event."""
    return message.kind == "announced" or message.record.without_notice
