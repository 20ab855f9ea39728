"""Any service that apprise supports: Opsgenie, Teams, Telegram, ...

apprise returns only whether it worked; the cause of a failure, and whether it is permanent, come
from its log lines. If a plugin has a key for alerts that belong together, each event has its own
key.
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

_STATUS: Final = re.compile(r"error[ =:]*\(?(\d{3})\b|\bstatus[ =:]*(\d{3})\b", re.IGNORECASE)
# the names of that key in plugins
KEYS: Final = (
    "dedup",
    "alias",
    "entity_id",
    "external_id",
    "thirdparty",
)
_NOTHING_SENT: Final = "(nothing to "  # the plugins of Opsgenie and Jira log this as a success
_LOGGER: Final = logging.getLogger("apprise")
_TYPES: Final = {"critical": "failure", "warning": "warning", "info": "info"}


class _Said(logging.Handler):
    """Collects the log of apprise in this thread inside a ``with``.

    Other sinks may log at the same time.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.records: list[logging.LogRecord] = []
        self._thread = threading.get_ident()

    @property
    def lines(self) -> list[str]:
        """The texts of warnings and errors."""
        return [one.getMessage() for one in self.records if one.levelno >= logging.WARNING]

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self._thread:
            self.records.append(record)

    def __enter__(self) -> Self:
        _LOGGER.addHandler(self)
        # needed here, even if not shown: other handlers have their own levels
        _LOGGER.setLevel(min(_LOGGER.getEffectiveLevel(), logging.INFO))
        return self

    def __exit__(self, *_: object) -> None:
        _LOGGER.removeHandler(self)


class Sink(BaseSink):
    """One apprise address."""

    def __init__(self, _name: str, settings: Apprise, messages: Messages) -> None:
        import apprise  # noqa: PLC0415 - half a second and 37 MB, only for this sink

        # else its plugins would send the login of a .netrc file instead of the token in the address
        os.environ["NETRC"] = os.devnull
        self._messages = messages
        asset = apprise.AppriseAsset(
            app_id="notbefore", app_desc="Azure Scheduled Events", http_redirects=False
        )
        with _Said() as said:
            # the service itself, not an `Apprise` object, which sends in its own threads
            service = apprise.Apprise.instantiate(settings.url.reveal(), asset=asset)
        if not isinstance(service, apprise.NotifyBase):
            raise ConfigError(
                f"apprise does not know this address: {' '.join(said.lines) or 'no reason given'}"
            )
        self._service = service
        self._key = _prepare(service, settings.url.reveal())
        # seconds between messages: the receiver asks for a pause if it needs one
        service.request_rate_per_sec = 0
        service.socket_connect_timeout = service.socket_read_timeout = settings.timeout.seconds

    def send(self, message: Message) -> Receipt:
        """Send it through apprise."""
        text = text_of(message, self._messages)
        body_format = self._service.resolve_format("text").value
        said = notification(message, text, body_format)
        if self._key is not None:
            setattr(self._service, self._key, message.alert_key)
        with _Said() as logged:
            accepted = self._service.notify(**said)
        if not accepted:
            # the error of urllib3, which apprise does not hand out, is a reference cycle: it holds
            # all that was read
            gc.collect()
            raise _reason(logged.lines)
        if any(_NOTHING_SENT in one.getMessage() for one in logged.records):
            opens = "to let it open an alert, add `&:info=new` to the url"
            todo = "close the alert by hand" if message.settled else opens
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
    kind = "success" if message.is_good_news else _TYPES[message.shown_severity]
    body = text.whole
    if shown_as == "markdown":
        body = "\n\n".join(filter(None, body.splitlines()))
    return {"notify_type": kind, "title": text.title, "body": body, "body_format": "text"}


def _prepare(service: Any, url: str) -> str | None:
    """Let the plugin close the alerts that it opens, if it can.

    Return its attribute for the event's key, or ``None``.

    Settings in the user's address are not changed.
    """
    given = parse_qs(urlsplit(url).query)
    if "map" in service.template_args.get("action", {}).get("values", ()) and "action" not in given:
        service.action = "map"  # `success` closes the alert; other types open one, or add to it
    key = next((name for name in KEYS if hasattr(service, name)), None)
    # Splunk's key is never empty: if the address has none, it starts with the app's name
    own = str(getattr(service, key) or "") if key is not None else ""
    return key if not own or own.startswith(f"{service.app_id}/") else None


def _reason(lines: list[str]) -> SendError:
    cause = " ".join(lines) or "apprise gives no reason"
    statuses = [int(first or second) for line in lines for first, second in _STATUS.findall(line)]
    error = error_of_status(statuses[-1], cause) if statuses else None
    return error or SendError(cause)  # without a status, the network may be the cause
