"""``SimulatorState``: the events of a simulator, its faults and its start requests. No HTTP.

The scenarios are in scenarios.json. Their times and texts follow Microsoft's documentation and
captures from real VMs: the minimum notice of each type, some seconds of impact, about ten minutes
from Started to the end.
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
from msgspec.structs import replace

from notbefore.core.event_types import event_type_of

# seconds from a start request to Started; real delays were seen from none to longer
APPROVED_AFTER: Final = 2.0
FAULTS: Final = {  # kind -> default value, a status or seconds
    "status": 500.0,
    "empty": 0.0,  # 200 with an empty body
    "slow": 20.0,  # the right answer after this time
    "garbage": 0.0,  # 200 with a body that is not JSON
    "freeze": 30.0,  # the connection is accepted, and nothing is sent for this time
    "start-status": 503.0,  # a start request gets this status and is ignored
    "start-freeze": 30.0,  # a start request is accepted, and not answered for this time
}
# of the speed: between these, every year has four digits
SLOWEST: Final = 0.01
FASTEST: Final = 100_000.0
MAX_PLAYS: Final = 1_000  # played since the last ``clear``
MAX_FAULTS: Final = 10_000  # that wait for their answers
MAX_VALUE: Final = 86_400.0  # of a fault; no client waits longer than a day
STATUSES: Final = range(300, 600)  # of faults


class Scenario(Struct, frozen=True):
    """The course of one event. Durations are seconds of real time."""

    name: str
    event_type: str
    event_source: str
    description: str
    duration: int  # DurationInSeconds; -1: unknown
    notice: float  # from announced to NotBefore, when it starts unless approved; 0: none
    started: float  # from Started to the end
    canceled_after: float = 0.0  # canceled so long after it was announced; 0: not canceled


def _read_scenarios() -> dict[str, Scenario]:
    content = Path(__file__).with_name("scenarios.json").read_bytes()
    scenarios = msgspec.json.decode(content, type=list[Scenario])
    return {scenario.name: scenario for scenario in scenarios}


def _by_all_names(scenarios: dict[str, Scenario]) -> dict[str, Scenario]:
    """Return the first scenario of each event type by that type, and all by their own names."""
    by_type: dict[str, Scenario] = {}
    for scenario in scenarios.values():
        by_type.setdefault(scenario.event_type.lower(), scenario)
    return by_type | scenarios


SCENARIOS: Final = _read_scenarios()
NAMED: Final = _by_all_names(SCENARIOS)
"""The scenarios by the names that commands accept: `reboot` is the first Reboot."""


class Play(Struct, frozen=True):
    """A scenario in play for one event.

    ``begun`` and ``approved`` are Unix seconds of the wall clock.
    """

    scenario: Scenario
    event_id: str
    resources: tuple[str, ...]
    begun: float
    speed: float = 1.0  # 60 plays an hour in a minute
    # canceled after half of the notice, if it has notice and was not approved by then. A scenario
    # may have its own time for that
    cancel: bool = False
    approved: float | None = None

    @property
    def not_before(self) -> float:
        """When it starts unless it is approved, in Unix seconds."""
        return self.begun + self.scenario.notice / self.speed

    def status(self, now: float) -> str | None:
        """Return ``Scheduled``, ``Started``, or ``None`` when it is gone."""
        start = self.not_before
        is_advice = event_type_of(self.scenario.event_type).is_advice
        if self.approved is not None and not is_advice:  # an approval of an advice has no effect
            start = min(start, self.approved + APPROVED_AFTER / self.speed)
        end = start + self.scenario.started / self.speed

        if self._is_canceled(now):
            return None
        if now < start:
            return "Scheduled"
        if now < end:
            return "Started"
        return None

    def published_status(self, now: float) -> str:
        """Return the status as Azure publishes it, which also says how the event ended."""
        status = self.status(now)
        if status is not None:
            return status
        if self._is_canceled(now):
            return "Canceled"
        return "Completed"

    def _is_canceled(self, now: float) -> bool:
        if self.approved is not None:  # Azure does not cancel an approved event
            return False
        canceled_after = self.scenario.canceled_after
        if self.cancel and not canceled_after:
            canceled_after = self.scenario.notice / 2
        return canceled_after > 0 and now >= self.begun + canceled_after / self.speed

    def item(self, now: float) -> dict[str, Any] | None:
        """Return the event as an item of the document; ``None`` when it is not listed."""
        status = self.status(now)
        if status is None:
            return None
        return self.with_status(status)

    def with_status(self, status: str) -> dict[str, Any]:
        """Return the event as Azure describes it with a status."""
        not_before = ""
        if status == "Scheduled":
            not_before = formatdate(self.not_before, usegmt=True)
        scenario = self.scenario
        return {
            "EventId": self.event_id,
            "EventStatus": status,
            "EventType": scenario.event_type,
            "ResourceType": "VirtualMachine",
            "Resources": list(self.resources),
            "NotBefore": not_before,
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

        It may be a number that ``HTTPStatus`` lacks.
        """
        if not self.kind.endswith("status"):
            return None
        return int(self.value)

    @property
    def is_of_start_request(self) -> bool:
        """Whether it affects a start request, not an answer with the document."""
        return self.kind.startswith("start-")


class SimulatorState:
    """The VMs of one group, which all see the same events. Safe to use from several threads."""

    def __init__(self, vms: Sequence[str], speed: float) -> None:
        self.vms = tuple(vms)
        self.speed = speed
        self.requests = 0  # for the document
        self.start_requests: list[str] = []  # the approved EventIds, in order
        self.start_incarnations: list[int | None] = []  # of each start request
        self._lock = threading.Lock()
        self._plays: dict[str, Play] = {}  # by EventId in lower case
        self._fixed_document: bytes | None = None  # of ``set_document``
        self._faults: list[Fault] = []
        self._refused_versions: dict[str, int] = {}  # api-version -> status of the answer
        self._incarnation = 1
        self._last_items: list[dict[str, Any]] = []  # of the last document
        self._release = threading.Event()  # set to release the clients that faults hold

    def start(
        self,
        scenario: str,
        *,
        resources: Sequence[str] = (),
        cancel: bool = False,
        speed: float | None = None,
    ) -> str:
        """Start a scenario; return its EventId. ``resources``: by default the first VM.

        Raises ``ValueError`` if too many events were played.
        """
        event_id = str(uuid.uuid4()).upper()
        play = Play(
            scenario=SCENARIOS[scenario],
            event_id=event_id,
            resources=tuple(resources) or self.vms[:1],
            begun=time.time(),
            speed=speed or self.speed,
            cancel=cancel,
        )
        with self._lock:
            if len(self._plays) >= MAX_PLAYS:
                raise ValueError(f"{MAX_PLAYS} events were played: clear them first")
            self._fixed_document = None
            self._plays[event_id.casefold()] = play
        return event_id

    def set_document(self, document: bytes | dict[str, Any]) -> None:
        """Answer with this document, valid or not, until ``clear``."""
        if not isinstance(document, bytes):
            document = msgspec.json.encode(document)
        with self._lock:
            self._fixed_document = document

    def fault(self, kind: str, value: float | None = None, times: int = 1) -> None:
        """Let the next ``times`` answers fail. Several faults occur one after the other.

        Raises ``ValueError`` for an unknown kind or a wrong value, or if too many faults wait.
        """
        if kind not in FAULTS:
            raise ValueError(f"no fault {kind[:60]!r}; there are {', '.join(FAULTS)}")
        if value is None:
            value = FAULTS[kind]
        fault = Fault(kind, value)
        is_valid = 0 <= value <= MAX_VALUE
        if is_valid and fault.status is not None:
            is_valid = fault.status in STATUSES
        if not is_valid:
            raise ValueError(
                f"{kind}: VALUE is 0 to {MAX_VALUE:g} seconds, or a status of 300 to 599"
            )
        with self._lock:
            if len(self._faults) + times > MAX_FAULTS:
                raise ValueError(f"more than {MAX_FAULTS} faults would wait: clear them first")
            self._faults += [fault] * times

    def refuse_version(self, api_version: str, status: int) -> None:
        """Refuse this api-version with a status, as an older IMDS does, until ``clear``."""
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
            self._fixed_document = None
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

        Return False, and accept none, if one names an event that never existed.

        An event that has started or is over does not change: its id is still valid, as after
        another VM's approval.
        """
        with self._lock:
            if not all(self._exists(event_id) for event_id in event_ids):
                return False
            for event_id in event_ids:
                self._approve(event_id)
            return True

    def _exists(self, event_id: str) -> bool:
        key = event_id.casefold()
        fixed_document = self._fixed_document or b""
        return key in self._plays or f'"{key}"'.encode() in fixed_document.lower()

    def _approve(self, event_id: str) -> None:
        now = time.time()
        key = event_id.casefold()
        play = self._plays.get(key)
        if play is None:  # only the fixed document has it
            self.start_requests.append(event_id)
            return
        self.start_requests.append(play.event_id)
        if play.approved is None and play.status(now) == "Scheduled":
            self._plays[key] = replace(play, approved=now)

    def take_fault(self, *, start_request: bool = False) -> Fault | None:
        """Remove and return the fault for this answer, if there is one; count the request."""
        with self._lock:
            if not start_request:
                self.requests += 1
            for fault in self._faults:
                if fault.is_of_start_request == start_request:
                    self._faults.remove(fault)
                    return fault
            return None

    def plays(self) -> tuple[Play, ...]:
        """Return all events since the last ``clear``, also those that have ended."""
        with self._lock:
            return tuple(self._plays.values())

    def body(self) -> bytes:
        """Return the present document; the incarnation rises whenever the content changes."""
        with self._lock:
            if self._fixed_document is not None:
                return self._fixed_document
            now = time.time()
            items: list[dict[str, Any]] = []
            for play in self._plays.values():
                item = play.item(now)
                if item is not None:
                    items.append(item)
            if items != self._last_items:
                self._last_items = items
                self._incarnation += 1
            return msgspec.json.encode({"DocumentIncarnation": self._incarnation, "Events": items})


def instance(vm: str) -> dict[str, Any]:
    """Return a made-up ``/metadata/instance`` of a VM, the same for each call."""
    subscription = "8d10da13-8125-4ba9-a717-bf7490507b3d"
    group = "fleet"
    provider = f"/subscriptions/{subscription}/resourceGroups/{group}/providers/Microsoft.Compute"
    return {
        "compute": {
            "location": "westeurope",
            "name": vm,
            "platformFaultDomain": "1",
            "platformUpdateDomain": "3",
            "resourceGroupName": group,
            "resourceId": f"{provider}/virtualMachines/{vm}",
            "subscriptionId": subscription,
            "tagsList": [{"name": "role", "value": "simulated"}],
            "vmId": str(uuid.uuid5(uuid.NAMESPACE_DNS, vm)),
            "vmScaleSetName": vm.rpartition("_")[0],
            "vmSize": "Standard_D2s_v5",
            "zone": "1",
        }
    }
