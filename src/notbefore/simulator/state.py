"""The simulator's state: the events, the faults, the start requests. No HTTP.

The scenarios are in scenarios.json. Their times and texts follow Microsoft's documentation and
captures from real VMs: minimum notice by type, some seconds of impact, about ten minutes from
Started to gone.
"""

import threading
import time
import uuid
from collections.abc import Sequence
from email.utils import formatdate
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Struct

from notbefore.core.event_types import event_type_of

# seconds from a start request to Started; real delays were seen from none to longer
APPROVED_AFTER: Final = 2.0
FAULTS: Final = {  # kind -> default VALUE, a status or seconds
    "status": 500.0,
    "empty": 0.0,  # 200 with an empty body
    "slow": 20.0,  # the right answer, so late
    "garbage": 0.0,  # 200 with a body that is not JSON
    "freeze": 30.0,  # the connection is accepted, and nothing is sent for so long
    "start-status": 503.0,  # a start request gets this status and is ignored
    "start-freeze": 30.0,  # a start request is accepted, and not answered for so long
}
MAX_VALUE: Final = 86_400.0  # of a fault; no client waits longer than a day


class Scenario(Struct, frozen=True):
    """The course of one event. Durations are seconds of real time."""

    name: str
    event_type: str
    event_source: str
    description: str
    duration: int  # DurationInSeconds; -1 = unknown
    notice: float  # from announced to NotBefore, when it starts unless approved; 0 = none
    started: float  # from Started to gone


SCENARIOS: Final = {
    scenario.name: scenario
    for scenario in msgspec.json.decode(
        Path(__file__).with_name("scenarios.json").read_bytes(), type=tuple[Scenario, ...]
    )
}


def _named() -> dict[str, Scenario]:
    """Return the scenarios by event type, the first one of each, and by their own names."""
    named: dict[str, Scenario] = {}
    for scenario in SCENARIOS.values():
        named.setdefault(scenario.event_type.lower(), scenario)
    return named | SCENARIOS


NAMED: Final = _named()
"""What commands call the scenarios: `reboot` is the first Reboot."""


class Play(Struct, frozen=True):
    """A scenario in play for one event.

    ``begun`` and ``approved`` are Unix seconds of the wall clock.
    """

    scenario: Scenario
    event_id: str
    resources: tuple[str, ...]
    begun: float
    speed: float = 1.0  # 60 plays an hour in a minute
    # canceled after half of the notice, if it has notice and was not approved by then
    cancel: bool = False
    approved: float | None = None

    @property
    def not_before(self) -> float:
        """When it starts unless it is approved, in Unix seconds."""
        return self.begun + self.scenario.notice / self.speed

    def status(self, now: float) -> str | None:
        """Return ``Scheduled``, ``Started``, or ``None`` when it is gone."""
        starts, half = self.not_before, (self.begun + self.not_before) / 2
        # an approval of an advice has no effect
        if self.approved is not None and not event_type_of(self.scenario.event_type).is_advice:
            starts = min(starts, self.approved + APPROVED_AFTER / self.speed)
        # Azure does not cancel an approved event
        if self.cancel and self.approved is None and self.scenario.notice and now >= half:
            return None
        if now < starts:
            return "Scheduled"
        return "Started" if now < starts + self.scenario.started / self.speed else None

    def item(self, now: float) -> dict[str, Any] | None:
        """Return the event as an item of the document, ``None`` when it is not listed."""
        status = self.status(now)
        if status is None:
            return None
        scenario = self.scenario
        return {
            "EventId": self.event_id,
            "EventStatus": status,
            "EventType": scenario.event_type,
            "ResourceType": "VirtualMachine",
            "Resources": list(self.resources),
            "NotBefore": formatdate(self.not_before, usegmt=True) if status == "Scheduled" else "",
            "Description": scenario.description,
            "EventSource": scenario.event_source,
            "DurationInSeconds": scenario.duration,
        }


class Fault(NamedTuple):
    """A fault on one answer."""

    kind: str
    value: float

    @property
    def status(self) -> int | None:
        """The HTTP status of the answer, for faults that are only a status.

        It may be one without a name.
        """
        return int(self.value) if self.kind.endswith("status") else None


class SimulatorState:
    """The VMs of one group, which all see the same events. Safe to use from several threads."""

    def __init__(self, vms: Sequence[str], speed: float) -> None:
        self.vms = tuple(vms)
        self.speed = speed
        self.requests = 0  # for the document
        self.start_requests: list[str] = []  # EventIds approved, in order
        self.start_incarnations: list[int | None] = []  # of each start request
        self._lock = threading.Lock()
        self._plays: dict[str, Play] = {}  # by EventId in lower case
        self._raw: bytes | None = None
        self._faults: list[Fault] = []
        self._refused_versions: dict[str, int] = {}  # api-version -> status of the answer
        self._incarnation = 1
        self._shown: list[dict[str, Any]] = []
        self._release = threading.Event()  # set to release the clients that faults hold

    def start(
        self,
        scenario: str,
        *,
        resources: Sequence[str] = (),
        cancel: bool = False,
        speed: float | None = None,
    ) -> str:
        """Start a scenario; returns its EventId."""
        event_id, vms = str(uuid.uuid4()).upper(), tuple(resources) or self.vms[:1]
        play = Play(SCENARIOS[scenario], event_id, vms, time.time(), speed or self.speed, cancel)
        with self._lock:
            self._raw = None
            self._plays[event_id.casefold()] = play
        return event_id

    def set_document(self, document: bytes | dict[str, Any]) -> None:
        """Answer with this document, valid or not, until ``clear``."""
        with self._lock:
            self._raw = document if isinstance(document, bytes) else msgspec.json.encode(document)

    def fault(self, kind: str, value: float | None = None, times: int = 1) -> None:
        """Let the next ``times`` answers fail. Several faults occur one after the other.

        Raises ``ValueError`` for an unknown kind or a wrong value.
        """
        if kind not in FAULTS:
            raise ValueError(f"no fault {kind!r}; there are {', '.join(FAULTS)}")
        fault = Fault(kind, FAULTS[kind] if value is None else value)
        if not 0 <= fault.value <= MAX_VALUE or fault.status not in (None, *range(300, 600)):
            raise ValueError(
                f"{kind}: VALUE is 0 to {MAX_VALUE:g} seconds, or a status of 300 to 599"
            )
        with self._lock:
            self._faults += [fault] * times

    def refuse_version(self, api_version: str, status: int) -> None:
        """Answer this api-version of the document with a status, as an older IMDS, until
        ``clear``.
        """
        with self._lock:
            self._refused_versions[api_version] = status

    def refusal_of(self, api_version: str) -> int | None:
        """Return the status that refuses an api-version; ``None`` if it is answered."""
        with self._lock:
            return self._refused_versions.get(api_version)

    def clear(self) -> None:
        """End all events and faults, and release every client."""
        with self._lock:
            self._plays = {}
            self._faults = []
            self._raw = None
            self._refused_versions = {}
            self._release.set()
            self._release = threading.Event()

    def hold(self, seconds: float) -> None:
        """Let a client wait ``seconds``, or until ``clear``."""
        with self._lock:
            release = self._release
        release.wait(seconds)

    def approve(self, event_ids: Sequence[str]) -> bool:
        """Accept start requests.

        Returns False, and accepts none, if one names an event that never existed.

        An event that has started or is over does not change: its id is still valid, as after
        another VM's approval.
        """
        now = time.time()
        with self._lock:
            written = (self._raw or b"").lower()  # the document of ``set_document``
            wanted = [event_id.casefold() for event_id in event_ids]
            if any(one not in self._plays and f'"{one}"'.encode() not in written for one in wanted):
                return False
            for event_id, one in zip(event_ids, wanted, strict=True):
                play = self._plays.get(one)
                self.start_requests.append(play.event_id if play is not None else event_id)
                if play is not None and play.approved is None and play.status(now) == "Scheduled":
                    self._plays[one] = msgspec.structs.replace(play, approved=now)
            return True

    def take_fault(self, *, start_request: bool = False) -> Fault | None:
        """Remove and return the fault for this answer, if there is one."""
        with self._lock:
            self.requests += not start_request
            fault = next(
                (one for one in self._faults if one.kind.startswith("start-") == start_request),
                None,
            )
            if fault is not None:
                self._faults.remove(fault)
            return fault

    def body(self) -> bytes:
        """Return the present document; the incarnation rises whenever the content changes."""
        with self._lock:
            if self._raw is not None:
                return self._raw
            now = time.time()
            items = [item for play in self._plays.values() if (item := play.item(now)) is not None]
            if items != self._shown:
                self._shown = items
                self._incarnation += 1
            return msgspec.json.encode({"DocumentIncarnation": self._incarnation, "Events": items})


def instance(vm: str) -> dict[str, Any]:
    """Return a made-up ``/metadata/instance`` of a VM, the same for each call."""
    subscription, group = "8d10da13-8125-4ba9-a717-bf7490507b3d", "fleet"
    above = f"/subscriptions/{subscription}/resourceGroups/{group}/providers/Microsoft.Compute"
    return {
        "compute": {
            "location": "westeurope",
            "name": vm,
            "platformFaultDomain": "1",
            "platformUpdateDomain": "3",
            "resourceGroupName": group,
            "resourceId": f"{above}/virtualMachines/{vm}",
            "subscriptionId": subscription,
            "tagsList": [{"name": "role", "value": "simulated"}],
            "vmId": str(uuid.uuid5(uuid.NAMESPACE_DNS, vm)),
            "vmScaleSetName": vm.rpartition("_")[0],
            "vmSize": "Standard_D2s_v5",
            "zone": "1",
        }
    }
