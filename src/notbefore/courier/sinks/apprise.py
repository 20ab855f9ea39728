"""Any service that apprise supports: Opsgenie, Teams, Telegram, ...

apprise returns only whether the service accepted a message. The cause of a failure, and whether it
is permanent, come from its log lines. If a plugin has a key for alerts that belong together, each
event has its own key.
"""

import gc
import logging
import os
import re
import threading
from typing import Any, Final, Self
from urllib.parse import parse_qs, urlsplit

from notbefore.config.sinks import Apprise, Messages
from notbefore.core.message import Message
from notbefore.courier.sink import Receipt
from notbefore.courier.sink import Sink as BaseSink
from notbefore.errors import ConfigError, SendError
from notbefore.net.response import error_of_status
from notbefore.wording.texts import Text, text_of

# an HTTP status in a log line
_STATUS: Final = re.compile(r"error[ =:]*\(?(\d{3})\b|\bstatus[ =:]*(\d{3})\b", re.IGNORECASE)
# the names that plugins have for the key of an alert
KEYS: Final = ("dedup", "alias", "entity_id", "external_id", "thirdparty")
# the plugins of Opsgenie and Jira log this, and return that they have sent the message
_NOTHING_SENT: Final = "(nothing to "
_LOGGER: Final = logging.getLogger("apprise")
_TYPES: Final = {"critical": "failure", "warning": "warning", "info": "info"}


class _AppriseLog(logging.Handler):
    """Collects the log of apprise in this thread inside a ``with``.

    Other sinks may log at the same time.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.records: list[logging.LogRecord] = []
        self._thread = threading.get_ident()

    @property
    def lines(self) -> list[str]:
        """All texts."""
        return [record.getMessage() for record in self.records]

    @property
    def problems(self) -> list[str]:
        """The texts of warnings and errors."""
        return [record.getMessage() for record in self.records if record.levelno >= logging.WARNING]

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        if record.thread == self._thread:
            self.records.append(record)

    def __enter__(self) -> Self:
        _LOGGER.addHandler(self)
        # these lines are needed, even if the log does not show them
        _LOGGER.setLevel(min(_LOGGER.getEffectiveLevel(), logging.INFO))
        return self

    def __exit__(self, *_: object) -> None:
        _LOGGER.removeHandler(self)


class Sink(BaseSink):
    """One apprise address."""

    def __init__(self, _name: str, settings: Apprise, messages: Messages) -> None:
        import apprise  # noqa: PLC0415 - half a second and 37 MB, only for this sink

        # otherwise its plugins send the login of a .netrc file instead of the token in the address
        os.environ["NETRC"] = os.devnull
        self._messages = messages
        asset = apprise.AppriseAsset(
            app_id="notbefore", app_desc="Azure Scheduled Events", http_redirects=False
        )
        url = settings.url.reveal()
        with _AppriseLog() as apprise_log:
            # the service itself, not an `Apprise` object, which sends in its own threads
            service = apprise.Apprise.instantiate(url, asset=asset)
        if not isinstance(service, apprise.NotifyBase):
            reason = " ".join(apprise_log.problems) or "no reason given"
            raise ConfigError(f"apprise does not know this address: {reason}")
        # seconds between messages: the receiver asks for a pause if it needs one
        service.request_rate_per_sec = 0
        service.socket_connect_timeout = settings.timeout.seconds
        service.socket_read_timeout = settings.timeout.seconds
        self._opens_alerts = _opens_alerts(service)
        if self._opens_alerts:
            _let_close_alerts(service, url)
        self._service = service
        self._key = _key_attribute(service)

    def send(self, message: Message) -> Receipt:
        """Send it through apprise."""
        text = text_of(message, self._messages)
        body_format = self._service.resolve_format("text").value
        arguments = notification(message, text, body_format)
        if self._key is not None:
            setattr(self._service, self._key, message.alert_key)
        if self._opens_alerts:
            # the plugins of Opsgenie and Jira would close an alert by the id of the request that
            # opened it: the service accepts that, and closes nothing
            self._service.store.clear()
        with _AppriseLog() as apprise_log:
            accepted = self._service.notify(**arguments)

        if not accepted:
            # the error of urllib3, which apprise does not hand out, is a reference cycle: it holds
            # all that was read
            gc.collect()
            raise _error(apprise_log.problems)
        if any(_NOTHING_SENT in line for line in apprise_log.lines):
            todo = "to let it open an alert, add `&:info=new` to the url"
            if message.settled:
                todo = "close the alert by hand"
            raise SendError(
                f"apprise has sent nothing: it found no open alert of this event; {todo}",
                permanent=True,
            )
        if self._key is None:
            return Receipt()
        return Receipt(thread=message.alert_key)


def notification(message: Message, text: Text, shown_as: str) -> dict[str, str]:
    """Return the arguments for apprise.

    The body is declared as plain text, so that apprise escapes it for the format in which the
    receiver shows it (``shown_as``). Markdown joins lines: there each line is a paragraph.
    """
    notify_type = _TYPES[message.shown_severity]
    if message.is_good_news:
        notify_type = "success"
    body = text.whole
    if shown_as == "markdown":
        body = "\n\n".join(filter(None, body.splitlines()))
    return {"notify_type": notify_type, "title": text.title, "body": body, "body_format": "text"}


def _opens_alerts(service: Any) -> bool:
    """Return whether the plugin opens alerts, and chooses by the message what to do with them."""
    actions = service.template_args.get("action", {}).get("values", ())
    return "map" in actions


def _let_close_alerts(service: Any, url: str) -> None:
    """Let the plugin close the alerts that it opens, unless the address says what it does."""
    if "action" not in parse_qs(urlsplit(url).query):
        service.action = "map"  # `success` closes the alert; other types open one, or add to it


def _key_attribute(service: Any) -> str | None:
    """Return the attribute of the plugin with the key of an alert.

    ``None`` if there is none, or if the address has a key, which is not changed.
    """
    for name in KEYS:
        if not hasattr(service, name):
            continue
        key = str(getattr(service, name) or "")
        # Splunk's key is never empty: if the address has none, it starts with the app's name
        if not key or key.startswith(f"{service.app_id}/"):
            return name
        return None
    return None


def _error(problems: list[str]) -> SendError:
    """Return the error for what apprise has logged."""
    cause = " ".join(problems) or "apprise gives no reason"
    statuses: list[int] = []
    for problem in problems:
        for match in _STATUS.finditer(problem):
            statuses.append(int(match[1] or match[2]))
    error = None
    if statuses:
        error = error_of_status(statuses[-1], cause)
    return error or SendError(cause)  # without a status, the network may be the cause
