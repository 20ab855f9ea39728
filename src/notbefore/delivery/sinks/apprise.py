"""Any service that apprise knows: PagerDuty, Opsgenie, Teams, Telegram, ...

apprise says only whether it worked; why not, and whether that is for good, is read from what it logs.
"""

import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from notbefore.config.sinks import Apprise, Links
from notbefore.delivery.http import MAX_CAUSE
from notbefore.delivery.message import Message, Receipt
from notbefore.delivery.render import Renderer
from notbefore.delivery.retry import outcome_of_status
from notbefore.errors import ConfigError, SendError

_STATUS: Final = re.compile(r"error[ =:]*\(?(\d{3})\b|\bstatus[ =:]*(\d{3})\b", re.IGNORECASE)
_TYPES: Final = {"critical": "failure", "warning": "warning", "info": "info"}


class _Ear(logging.Handler):
    """What apprise logs in one thread while a message is sent: of several sinks each hears its own."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.heard: list[str] = []
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self._thread:
            self.heard.append(record.getMessage())


@contextmanager
def _listening() -> Iterator[list[str]]:
    """What apprise says meanwhile in this thread."""
    ear, logger = _Ear(), logging.getLogger("apprise")
    logger.addHandler(ear)
    # what is not to be logged is to be heard all the same; the handlers' own levels see to the log
    if logger.getEffectiveLevel() > logging.WARNING:
        logger.setLevel(logging.WARNING)
    try:
        yield ear.heard
    finally:
        logger.removeHandler(ear)


class Sink:
    """One apprise address."""

    def __init__(self, name: str, settings: Apprise, links: Links) -> None:
        import apprise  # noqa: PLC0415 - half a second and 37 MB that nobody else pays for

        self._name = name
        self._links = links
        self._kind = apprise.NotifyType
        self._render = Renderer(settings.title, settings.body)
        asset = apprise.AppriseAsset(
            app_id="notbefore",
            app_desc="Azure Scheduled Events",
            http_redirects=False,
            secure_logging=True,
        )
        with _listening() as heard:
            # the service itself, not an `Apprise` around it: that one sends in threads of its own
            service = apprise.Apprise.instantiate(settings.url.reveal(), asset=asset)
        if not isinstance(service, apprise.NotifyBase):
            raise ConfigError(f"apprise does not know this address: {' '.join(heard) or 'no reason given'}")
        self._service = service
        service.socket_connect_timeout = service.socket_read_timeout = settings.timeout.seconds

    def send(self, message: Message) -> Receipt:
        """Have apprise send it."""
        text = self._render(message)
        links = [link for link in (self._links.dashboard, self._links.runbook) if link]
        body = "\n".join([text.plain, *links])
        kind = "success" if message.over else _TYPES[message.severity]
        with _listening() as heard:
            accepted = self._service.notify(body=body, title=text.title, notify_type=self._kind(kind))
        if not accepted:
            raise _reason(heard)
        return Receipt(fallback=text.fallback)

    def close(self) -> None:
        """Nothing is kept open."""


def _reason(heard: list[str]) -> SendError:
    cause = " ".join(heard)[:MAX_CAUSE] or "apprise gives no reason"
    statuses = [int(first or second) for line in heard for first, second in _STATUS.findall(line)]
    if not statuses:  # it may be the network: come again
        return SendError(cause)
    outcome = outcome_of_status(statuses[-1])
    return SendError(cause, permanent=outcome.permanent)
