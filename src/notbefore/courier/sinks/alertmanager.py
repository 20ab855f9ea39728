"""Alertmanager: each event is one alert, the same from every VM, sent to every member of a cluster.

Labels and annotations are the same on all VMs, so that the cluster has one alert for all. All
messages of an event have the labels of the first one: other labels would be another alert. Only if
the event becomes more severe, there is a second alert, and the same request ends the first. While
the event lasts, the alert is repeated before Alertmanager would resolve it. ``notbefore fleet``
does not repeat its alerts, as each takeover would have to continue that: their ``endsAt`` is later
than any end in the fleet.
"""

from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

import msgspec

from notbefore.config.sinks import Alertmanager, Messages
from notbefore.core.change import SILENT
from notbefore.core.event_types import SEVERITIES
from notbefore.core.message import Message
from notbefore.core.record import json_line
from notbefore.core.text import escaped, one_line, rfc3339, some_of
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
        # the timeout is for all members together
        super().__init__(
            messages, Http(settings.timeout.seconds / len(self._urls), ca_file=settings.ca_file)
        )
        self._headers = headers_of(settings) | {"Content-Type": "application/json"}

    def send(self, message: Message) -> Receipt:
        """POST the alert to every member.

        One that accepts is enough: each member notifies of its alerts.
        """
        text = text_of(message.shared, self._messages)
        sent = alerts(message, text, self._settings)
        body = json_line(sent)
        failures: list[SendError] = []
        for url in self._urls:
            try:
                self._http.post(f"{url}/api/v2/alerts", self._headers, body).check()
            except SendError as error:
                # its traceback has this frame, which holds the error: a cycle
                failures.append(error.with_traceback(None))
        if len(failures) == len(self._urls):
            raise SendError(
                "; ".join(map(str, failures)),
                permanent=all(error.permanent for error in failures),
                by_hand=all(error.by_hand for error in failures),
                retry_after=max(error.retry_after or 0.0 for error in failures) or None,
            )
        # if the event no longer affects this VM, the VMs that it still affects repeat the alert
        lasts = not (
            message.over
            or message.record.no_longer_affected
            or message.record.fleet_events is not None
        )
        repeat = self._settings.resolve_timeout.seconds / REPEATS if lasts else None
        return Receipt(json_line(sent[0]["labels"]).decode(), repeat=repeat)


def alerts(message: Message, text: Text, settings: Alertmanager) -> list[dict[str, Any]]:
    """Return the alert; and the end of the previous one, if the event has become more severe.

    ``startsAt`` is when the event was first seen, ``endsAt`` when its end was seen.
    """
    record = message.record
    first = labels = _labels(message, settings)
    with suppress(msgspec.DecodeError):  # the thread of the event has its labels so far
        first = msgspec.json.decode(message.thread or "", type=dict[str, str])
        severity = next(
            one for one in SEVERITIES if one in (message.severity, first.get("severity"))
        )
        labels = first | {"severity": severity}
    links = {link.name: link.value for link in text.links}
    annotations = {
        "summary": text.title,
        "description": text.plain,
        "status": one_line(record.event_status),
        "outcome": record.outcome or "",
        "resources": one_line(some_of(record.names, NAMES_IN_ANNOTATION)),
        "not_before": rfc3339(record.not_before) if record.not_before else "",
        "delivery_id": message.delivery_id,
        "dashboard": links.get("Dashboard", ""),
        "runbook_url": links.get("Runbook", ""),
        "page": links.get("Agent's page", ""),
    }
    values: dict[str, Any] = {
        "labels": labels,
        "annotations": {name: value for name, value in annotations.items() if value},
        "startsAt": rfc3339(min(record.first_seen, message.now)),
        "generatorURL": links.get("Dashboard", ""),
    }
    if message.over:
        values["endsAt"] = rfc3339(min(record.time, message.now))
    elif record.fleet_events is not None:
        lasts = SILENT_LASTS if record.event_type == SILENT else FLEET_LASTS
        with suppress(OverflowError):  # beyond the year 9999
            values["endsAt"] = rfc3339(max(record.time, record.not_before or record.time) + lasts)
    if labels == first:
        return [values]
    return [values, values | {"labels": first, "endsAt": rfc3339(message.now)}]


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
        "exercise": "true" if record.exercise else "",
    }
    return {name: escaped(value) for name, value in labels.items() if value}
