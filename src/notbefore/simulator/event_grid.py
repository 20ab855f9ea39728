"""``EventGrid``: what Event Grid delivers about the events of a simulator, and when.

No network: ``commands/hub_writer`` sends the messages. They have the forms of Microsoft's page
"Scheduled Events in Event Grid".
"""

import heapq
import random
import uuid
from datetime import UTC, datetime
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from notbefore.simulator.state import Play, SimulatorState, instance

Schema = Literal["event-grid", "cloud-events"]
SCHEMAS: Final[tuple[Schema, ...]] = ("event-grid", "cloud-events")
EVENT_TYPE: Final = "Microsoft.ResourceNotifications.MaintenanceResources.ScheduledEventEmitted"
STEPS: Final = ("Scheduled", "Started", "Completed")  # of an event that is not canceled

DELIVERY_FAULTS: Final = {  # kind -> default value
    "late": 60.0,  # seconds by which each message is late
    "reorder": 30.0,  # each message is late by another time, up to so many seconds
    "repeat": 1.0,  # how often each message is delivered again
}
MAX_LATE: Final = 86_400.0  # seconds: Event Grid tries for a day
MAX_REPEATS: Final = 10
REPEATED_WITHIN: Final = 5.0  # seconds


class DeliveryFaults(Struct, frozen=True):
    """Faults in the delivery of messages: seconds, and a number of repetitions."""

    late: float = 0.0
    reorder: float = 0.0
    repeat: float = 0.0

    def with_fault(self, kind: str, value: float | None) -> "DeliveryFaults":
        """Return the faults and another one. Raises ``ValueError`` for a wrong kind or value."""
        if kind not in DELIVERY_FAULTS:
            raise ValueError(f"KIND is {', '.join(DELIVERY_FAULTS)}")
        if value is None:
            value = DELIVERY_FAULTS[kind]
        most = MAX_LATE
        if kind == "repeat":
            most = MAX_REPEATS
        if not 0 <= value <= most:
            raise ValueError(f"VALUE is 0 to {most:g}")
        return replace(self, **{kind: value})


class EventGrid:
    """The messages about the events of a simulator, in the order in which they are delivered."""

    def __init__(
        self, state: SimulatorState, schema: Schema, faults: DeliveryFaults, seed: int | None = None
    ) -> None:
        self._state = state
        self._schema = schema
        self._faults = faults
        self._dice = random.Random(seed)
        self._published: dict[str, str] = {}  # EventId -> its last published status
        self._waiting: list[tuple[float, int, bytes]] = []  # a heap: when it is due, its number
        self._number = 0

    @property
    def partition_key(self) -> str:
        """The key that the records of the agents on these VMs have."""
        compute = instance(self._state.vms[0])["compute"]
        names = (compute["subscriptionId"], compute["resourceGroupName"], compute["vmScaleSetName"])
        return "/".join(name for name in names if name).casefold()

    def due(self, now: float) -> list[bytes]:
        """Return the messages that are delivered by ``now``, in Unix seconds; each once."""
        for play in self._state.plays():
            for status in self._news_of(play, now):
                self._publish(play, status, now)

        messages: list[bytes] = []
        while self._waiting and self._waiting[0][0] <= now:
            _, _, body = heapq.heappop(self._waiting)
            messages.append(body)
        return messages

    def _news_of(self, play: Play, now: float) -> list[str]:
        """Return the statuses of an event that were not published yet."""
        last = self._published.get(play.event_id)
        status = play.published_status(now)
        if status == last:
            return []

        self._published[play.event_id] = status
        first = play.published_status(play.begun)
        if status == "Canceled" and last is None:
            return [first, status]
        if status == "Canceled":
            return [status]

        # at a high speed, the event may have taken several steps since the last look
        next_step = STEPS.index(first)
        if last is not None:
            next_step = STEPS.index(last) + 1
        return list(STEPS[next_step : STEPS.index(status) + 1])

    def _publish(self, play: Play, status: str, now: float) -> None:
        body = msgspec.json.encode(self._message(play, status, now))
        faults = self._faults
        due = now + faults.late + self._dice.uniform(0.0, faults.reorder)
        self._wait(due, body)
        for _ in range(round(faults.repeat)):
            self._wait(due + self._dice.uniform(0.0, REPEATED_WITHIN), body)

    def _wait(self, due: float, body: bytes) -> None:
        self._number += 1
        heapq.heappush(self._waiting, (due, self._number, body))

    def _message(self, play: Play, status: str, now: float) -> dict[str, Any]:
        """Return the message about an event in the configured schema."""
        compute = instance(play.resources[0])["compute"]
        subscription = f"/subscriptions/{compute['subscriptionId']}"
        resource = compute["resourceId"]
        if compute["vmScaleSetName"]:
            provider, _, _ = resource.rpartition("/virtualMachines/")
            resource = f"{provider}/virtualMachineScaleSets/{compute['vmScaleSetName']}"
        event = f"{resource}/providers/microsoft.maintenance/scheduledevents/{play.event_id}"
        time = datetime.fromtimestamp(now, UTC).isoformat().replace("+00:00", "Z")
        info = {
            "id": event,
            "name": play.event_id,
            "type": "microsoft.maintenance/scheduledevents",
            "location": compute["location"],
            "properties": play.with_status(status),
        }
        data = {
            "resourceInfo": info,
            "operationalInfo": {"resourceEventTime": time},
            "apiVersion": "2024-07-01",
        }
        if self._schema == "cloud-events":
            return {
                "specversion": "1.0",
                "id": str(uuid.uuid4()),
                "source": subscription,
                "subject": event,
                "type": EVENT_TYPE,
                "time": time,
                "data": data,
            }
        return {
            "id": str(uuid.uuid4()),
            "topic": subscription,
            "subject": event,
            "eventType": EVENT_TYPE,
            "eventTime": time,
            "data": data,
            "dataVersion": "1",
            "metadataVersion": "1",
        }
