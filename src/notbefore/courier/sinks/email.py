"""E-mail over SMTP, with the standard library. All mails of one event are one thread.

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
from notbefore.courier.sink import Receipt
from notbefore.courier.sink import Sink as BaseSink
from notbefore.errors import SendError
from notbefore.wording.texts import Text, text_of

DOMAIN: Final = "notbefore.invalid"  # of message ids: a domain that cannot exist, RFC 2606
PORTS: Final = {"starttls": 587, "tls": 465, "none": 25}
PERMANENT: Final = range(500, 600)  # SMTP replies that are permanent errors

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
        account = self._account
        host, port, timeout = (
            account.host,
            account.port or PORTS[account.tls],
            account.timeout.seconds,
        )
        try:
            server: smtplib.SMTP
            if account.tls == "tls":
                server = smtplib.SMTP_SSL(host, port, timeout=timeout, context=self._tls)
            else:
                server = smtplib.SMTP(host, port, timeout=timeout)
            try:
                if account.tls == "starttls":
                    server.starttls(context=self._tls)
                if account.user and account.password is not None:
                    server.login(account.user, account.password.reveal())
                yield server
                # the answer to QUIT does not matter for the mail
                with suppress(OSError, smtplib.SMTPException):
                    server.quit()
            finally:
                server.close()
        except smtplib.SMTPResponseException as error:
            said = f"{error.smtp_code} {_words(error.smtp_error)}"
            # the password may be corrected
            login = isinstance(error, smtplib.SMTPAuthenticationError)
            permanent = error.smtp_code in PERMANENT and not login
            raise SendError(
                f"the mail server answered {said}", permanent=permanent, by_hand=login
            ) from None
        except smtplib.SMTPNotSupportedError as error:
            raise SendError(
                f"the mail server does not support this: {error}", permanent=True
            ) from None
        except (smtplib.SMTPException, OSError) as error:
            raise SendError(
                f"{host}: {error.strerror or f'{type(error).__name__}: {error}'}"
            ) from None


def _transfer(server: smtplib.SMTP, mail: EmailMessage, account: Email, name: str) -> None:
    recipients = list(dict.fromkeys(account.to))
    try:
        refused = server.send_message(mail, from_addr=account.sender, to_addrs=recipients)
    except smtplib.SMTPRecipientsRefused as answer:
        refused = answer.recipients
    said = "; ".join(
        f"{address}: {code} {_words(text)}" for address, (code, text) in sorted(refused.items())
    )
    if len(refused) == len(recipients):
        raise SendError(
            f"refused: {said}", permanent=all(code in PERMANENT for code, _ in refused.values())
        )
    if refused:  # the others have the mail, and must not get it again or wait for these
        log.error(
            "sink %s: some recipients were refused, and do not get this mail (%s)", name, said
        )


def _words(text: bytes | str) -> str:
    return " ".join((text.decode(errors="replace") if isinstance(text, bytes) else text).split())


def compose(message: Message, text: Text, account: Email) -> EmailMessage:
    """Return the mail.

    All mails of one event refer to the same root, so that they are one thread.
    """
    mail = EmailMessage()
    # a title is one line; EmailMessage decodes what follows "=?", and a line end in it could start
    # another header
    mail["Subject"] = text.title[:200].replace("=?", "= ?")
    mail["From"] = f"notbefore <{account.sender}>"
    mail["To"] = ", ".join(account.to)
    mail["Date"] = format_datetime(message.now)
    mail["Message-ID"] = f"<{message.delivery_id}@{DOMAIN}>"
    root = hashlib.sha256(f"{message.event_key}\n{message.sink}".encode()).hexdigest()[:32]
    mail["References"] = mail["In-Reply-To"] = f"<{root}@{DOMAIN}>"
    mail["Auto-Submitted"] = "auto-generated"  # RFC 3834: no automatic reply to it
    mail.set_content(f"{text.whole}\n")
    return mail
