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
from notbefore.delivery.message import Message, Receipt
from notbefore.delivery.render import Renderer
from notbefore.delivery.retry import outcome_of_status
from notbefore.errors import ConfigError, SendError

_STATUS: Final = re.compile(r"error[ =:]*\(?(\d{3})\b|\bstatus[ =:]*(\d{3})\b", re.IGNORECASE)
MAX_CAUSE: Final = 8_000  # characters
_TYPES: Final = {"critical": "failure", "warning": "warning", "info": "info"}


class _ThreadLog(logging.Handler):
    """What apprise logs in one thread: several sinks may use it at once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self._thread:
            self.lines.append(record.getMessage())


@contextmanager
def _logged() -> Iterator[list[str]]:
    """What apprise logs in this thread inside the block."""
    handler, logger = _ThreadLog(), logging.getLogger("apprise")
    logger.addHandler(handler)
    # it is read here even where it is not shown: that depends on the levels of the other handlers
    if logger.getEffectiveLevel() > logging.WARNING:
        logger.setLevel(logging.WARNING)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)


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
        with _logged() as lines:
            # the service itself, not an `Apprise` around it: that one sends in threads of its own
            service = apprise.Apprise.instantiate(settings.url.reveal(), asset=asset)
        if not isinstance(service, apprise.NotifyBase):
            raise ConfigError(f"apprise does not know this address: {' '.join(lines) or 'no reason given'}")
        self._service = service
        service.request_rate_per_sec = 0  # seconds between two messages: the receiver says itself when it is too much
        service.socket_connect_timeout = service.socket_read_timeout = settings.timeout.seconds

    def send(self, message: Message) -> Receipt:
        """Send it through apprise."""
        text = self._render(message)
        links = [link for link in (self._links.dashboard, self._links.runbook) if link]
        body = "\n".join([text.plain, *links])
        kind = "success" if message.over else _TYPES[message.severity]
        with _logged() as lines:
            accepted = self._service.notify(body=body, title=text.title, notify_type=self._kind(kind))
        if not accepted:
            raise _reason(lines)
        return Receipt(fallback=text.fallback)

    def close(self) -> None:
        """Nothing is kept open."""


def _reason(lines: list[str]) -> SendError:
    cause = " ".join(lines)[:MAX_CAUSE] or "apprise gives no reason"
    statuses = [int(first or second) for line in lines for first, second in _STATUS.findall(line)]
    if not statuses:  # it may be the network
        return SendError(cause)
    outcome = outcome_of_status(statuses[-1])
    return SendError(cause, permanent=outcome.permanent, may_pass=outcome.may_pass)
