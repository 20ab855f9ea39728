"""Alertmanager: each event is one alert, the same from every VM, sent to every member of a cluster.

Labels and annotations are the same on all VMs, so that the cluster has one alert for all. All
messages of an event have the labels of the first one: other labels would be another alert. Only if
the event becomes more severe, there is a second alert, and the same request ends the first.

While the event lasts, the alert is repeated before Alertmanager would resolve it. ``notbefore
fleet`` does not repeat its alerts, because each takeover would have to continue that. Their
``endsAt`` is later than any end in the fleet.
"""

from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec

from notbefore.config.sinks import Alertmanager, Messages
from notbefore.core.change import SILENT
from notbefore.core.event_types import SEVERITIES, Severity
from notbefore.core.message import Message
from notbefore.core.record import Record, json_line
from notbefore.core.text import escaped, one_line, rfc3339, some_of, without_mentions
from notbefore.courier.http_sink import HttpSink, headers_of
from notbefore.courier.sink import Receipt
from notbefore.errors import SendError
from notbefore.net.http import Http
from notbefore.wording.texts import Text, text_of

ALERT_NAME: Final = "AzureScheduledEvent"
REPEATS: Final = 3  # per resolve_timeout
NAMES_IN_ANNOTATION: Final = 10  # of VMs, in `resources`
# after NotBefore: long after `over_after` has ended the event
FLEET_LASTS: Final = timedelta(days=1)
# a VM may be missing for weeks; the fleet sends the end as soon as it is not
SILENT_LASTS: Final = timedelta(days=30)


class Sink(HttpSink):
    """A cluster of Alertmanagers."""

    def __init__(self, _name: str, settings: Alertmanager, messages: Messages) -> None:
        self._settings = settings
        self._urls = [url.rstrip("/") for url in dict.fromkeys(settings.urls)]
        timeout = settings.timeout.seconds / len(self._urls)  # for all members together
        super().__init__(messages, Http(timeout, ca_file=settings.ca_file))
        self._headers = headers_of(settings) | {"Content-Type": "application/json"}

    def send(self, message: Message) -> Receipt:
        """POST the alert to every member.

        One that accepts is enough: each member notifies of its alerts.
        """
        text = text_of(message.shared, self._messages)
        posted = alerts(message, text, self._settings)
        self._post_to_all(json_line(posted))
        labels = json_line(posted[0]["labels"]).decode()
        return Receipt(thread=labels, repeat=self._repeat_seconds(message))

    def _post_to_all(self, body: bytes) -> None:
        """Raise ``SendError`` if no member accepts the alerts."""
        failures: list[SendError] = []
        for url in self._urls:
            try:
                self._http.post(f"{url}/api/v2/alerts", self._headers, body).check()
            except SendError as error:
                # its traceback has this frame, which holds the error: a cycle
                failures.append(error.with_traceback(None))
        if len(failures) < len(self._urls):
            return
        raise SendError(
            "; ".join(str(error) for error in failures),
            permanent=all(error.permanent for error in failures),
            by_hand=all(error.by_hand for error in failures),
            retry_after=max(error.retry_after or 0.0 for error in failures) or None,
        )

    def _repeat_seconds(self, message: Message) -> float | None:
        """Return the seconds until the alert is sent again; ``None`` if it is not."""
        is_of_fleet = message.record.fleet_events is not None
        # if the event no longer affects this VM, the VMs that it still affects repeat the alert
        if message.over or message.record.no_longer_affected or is_of_fleet:
            return None
        return self._settings.resolve_timeout.seconds / REPEATS


def alerts(message: Message, text: Text, settings: Alertmanager) -> list[dict[str, Any]]:
    """Return the alert; and the end of the previous one, if the event has become more severe.

    ``startsAt`` is when the event was first seen, ``endsAt`` when its end was seen.
    """
    record = message.record
    labels = _labels(message, settings)
    previous_labels = _labels_of_thread(message)
    if previous_labels is not None:
        severity = _more_severe(message.severity, previous_labels.get("severity"))
        labels = previous_labels | {"severity": severity}

    annotations = _annotations(message, text)
    values: dict[str, Any] = {
        "labels": labels,
        "annotations": annotations,
        "startsAt": rfc3339(min(record.first_seen, message.now)),
        "generatorURL": annotations.get("dashboard", ""),
    }
    if message.over:
        values["endsAt"] = rfc3339(min(record.time, message.now))
    elif record.fleet_events is not None:
        with suppress(OverflowError):  # beyond the year 9999
            values["endsAt"] = rfc3339(_end_in_fleet(record))
    if previous_labels is None or previous_labels == labels:
        return [values]
    end_of_previous = values | {"labels": previous_labels, "endsAt": rfc3339(message.now)}
    return [values, end_of_previous]


def _annotations(message: Message, text: Text) -> dict[str, str]:
    """Return the annotations that have a value."""
    record = message.record
    not_before = ""
    if record.not_before is not None:
        not_before = rfc3339(record.not_before)
    links = {link.name: link.value for link in text.links}
    annotations = {
        "summary": text.title,
        "description": text.plain,
        "status": without_mentions(one_line(record.event_status)),
        "outcome": record.outcome or "",
        "resources": without_mentions(one_line(some_of(record.names, NAMES_IN_ANNOTATION))),
        "not_before": not_before,
        "delivery_id": message.delivery_id,
        "dashboard": links.get("Dashboard", ""),
        "runbook_url": links.get("Runbook", ""),
        "page": links.get("Agent's page", ""),
    }
    return {name: value for name, value in annotations.items() if value}


def _end_in_fleet(record: Record) -> datetime:
    """Return a time after any end in the fleet. Raises ``OverflowError`` beyond the year 9999."""
    start = max(record.time, record.not_before or record.time)
    if record.event_type == SILENT:
        return start + SILENT_LASTS
    return start + FLEET_LASTS


def _labels_of_thread(message: Message) -> dict[str, str] | None:
    """Return the labels of the event's previous message; ``None`` if there is none."""
    if message.thread is None:
        return None
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode(message.thread, type=dict[str, str])
    return None


def _more_severe(severity: Severity, previous: str | None) -> str:
    """Return the more severe of two severities."""
    for candidate in SEVERITIES:
        if candidate in (severity, previous):
            return candidate
    return severity


def _labels(message: Message, settings: Alertmanager) -> dict[str, str]:
    record = message.record
    labels = {
        **settings.labels,
        "alertname": ALERT_NAME,
        "event_id": record.event_id,
        "event_type": record.event_type,
        "event_source": record.event_source or "unknown",
        "severity": message.severity,
        "subscription": record.subscription_id or "",
        "resource_group": record.resource_group or "",
        "scale_set": record.scale_set or "",
    }
    if record.exercise:
        labels["exercise"] = "true"
    return {name: escaped(value) for name, value in labels.items() if value}
