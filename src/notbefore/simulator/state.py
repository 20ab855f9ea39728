"""The simulator's state: the events that play, the faults, the start requests. No HTTP."""

import hashlib
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Struct

from notbefore.errors import SimulatorError
from notbefore.simulator.scenarios import SCENARIOS, Play, as_of


class FaultKind(NamedTuple):
    """What a fault does. ``value``: what VALUE is unless given, a status or seconds."""

    text: str
    value: float = 0.0


FAULTS: Final = {
    "slow": FaultKind("answer after VALUE seconds", 2.0),
    "status": FaultKind("HTTP status VALUE", 500.0),
    "half": FaultKind("half of the body, then the connection is closed"),
    "garbage": FaultKind("200 with a body that is not JSON"),
    "freeze": FaultKind("accept the request, and send nothing for VALUE seconds", 30.0),
    "disconnect": FaultKind("the connection is reset without an answer"),
    "start-status": FaultKind("a start request is answered with HTTP status VALUE, and ignored", 503.0),
    "start-freeze": FaultKind("a start request is accepted, and not answered for VALUE seconds", 30.0),
}
MAX_VALUE: Final = 86_400.0  # of a fault; a day is longer than any client waits
SPEEDS: Final = (0.01, 100_000.0)
MAX_PLAYS: Final = 1_000  # the newest scenarios: so many are kept
MAX_START_REQUESTS: Final = 10_000
_STATUSES: Final = range(300, 600)


class Fault(Struct):
    """A fault on the next ``times`` answers of ``/metadata/scheduledevents``."""

    kind: str
    value: float
    times: int

    @property
    def status(self) -> int | None:
        """The status that is answered, where it is only that; it may be one that has no name."""
        return int(self.value) if self.kind.endswith("status") else None


class SimulatorState:
    """The VMs of one group, which all see the same events. Safe to use from several threads."""

    def __init__(self, vms: Sequence[str], speed: float) -> None:
        self.vms = tuple(vms)
        self.speed = check_speed(speed)
        self.requests = 0  # for the document
        self.start_requests: list[str] = []  # EventIds approved, in order
        self._lock = threading.Lock()
        self._plays: list[Play] = []
        self._raw: bytes | None = None
        self._faults: list[Fault] = []
        self._incarnation = 1
        self._shown_items: list[dict[str, Any]] = []
        self._release = threading.Event()  # set to let go the clients that faults hold

    # ---- control

    def start(
        self,
        scenario: str,
        *,
        resources: Sequence[str] = (),
        cancel: bool = False,
        reschedule: bool = False,
        speed: float | None = None,
    ) -> str:
        """Start a scenario; returns its EventId. Raises ``SimulatorError`` for an unknown one, or a wrong speed."""
        if scenario not in SCENARIOS:
            raise SimulatorError(f"no scenario {scenario!r}; there are {', '.join(SCENARIOS)}")
        speed = self.speed if speed is None else check_speed(speed)
        play = Play(
            SCENARIOS[scenario],
            str(uuid.uuid4()).upper(),
            tuple(resources) or self.vms[:1],
            time.time(),
            speed,
            cancel,
            reschedule,
        )
        with self._lock:
            self._raw = None
            self._plays = [*self._plays, play][-MAX_PLAYS:]
        return play.event_id

    def set_document(self, document: bytes | dict[str, Any]) -> None:
        """Answer with this document from now on, whatever it is; ``clear`` ends it."""
        with self._lock:
            self._raw = document if isinstance(document, bytes) else msgspec.json.encode(document)

    def fault(self, kind: str, value: float | None = None, times: int = 1) -> None:
        """Let the next ``times`` answers fail. Several faults come one after the other.

        Raises ``SimulatorError`` for an unknown one or a wrong value.
        """
        if kind not in FAULTS:
            raise SimulatorError(f"no fault {kind!r}; there are {', '.join(FAULTS)}")
        value = FAULTS[kind].value if value is None else value
        fault = Fault(kind, value, times)
        if not 0 <= value <= MAX_VALUE or (fault.status is not None and fault.status not in _STATUSES) or times < 1:
            text = f"VALUE is 0 to {MAX_VALUE:g} seconds, or a status of 300 to 599, and TIMES is 1 or more"
            raise SimulatorError(f"{kind}: {text}")
        with self._lock:
            self._faults.append(fault)

    def clear(self) -> None:
        """End all events and faults, and let go every client."""
        with self._lock:
            self._plays, self._faults, self._raw = [], [], None
            self._release.set()
            self._release = threading.Event()

    def hold(self, seconds: float) -> bool:
        """Wait ``seconds``, as a client is made to; returns False if ``clear`` ended it early."""
        with self._lock:
            release = self._release
        return not release.wait(seconds)

    def approve(self, event_ids: Sequence[str]) -> bool:
        """Accept start requests; returns False, and accepts none, if one names an event that never existed.

        An event that has started or is over does not change: its id is still valid, as after another VM's approval.
        """
        now = time.time()
        with self._lock:
            known = {play.event_id.casefold(): index for index, play in enumerate(self._plays)}
            written = (self._raw or b"").lower()  # a document that was set
            wanted = [event_id.casefold() for event_id in event_ids]
            if any(one not in known and f'"{one}"'.encode() not in written for one in wanted):
                return False
            for event_id, one in zip(event_ids, wanted, strict=True):
                play = self._plays[known[one]] if one in known else None
                self.start_requests.append(play.event_id if play is not None else event_id)
                if play is not None and play.approved is None and play.status(now) == "Scheduled":
                    self._plays[known[one]] = msgspec.structs.replace(play, approved=now)
            del self.start_requests[:-MAX_START_REQUESTS]
            return True

    # ---- for the handler

    def idle(self) -> bool:
        """Return whether every scenario has come to its end."""
        with self._lock:
            return all(play.status(time.time()) is None for play in self._plays)

    def take_fault(self, *, start_request: bool = False) -> Fault | None:
        """Return the fault for this answer, if there is one, and count it."""
        with self._lock:
            self.requests += not start_request
            due = [fault for fault in self._faults if fault.kind.startswith("start-") == start_request]
            if not due:
                return None
            fault = due[0]
            fault.times -= 1
            if fault.times <= 0:
                self._faults.remove(fault)
            return fault

    def body(self, api_version: str) -> bytes:
        """Return the document now; the incarnation rises whenever its content is new."""
        with self._lock:
            if self._raw is not None:
                return self._raw
            now = time.time()
            items = [item for play in self._plays if (item := play.item(now)) is not None]
            if items != self._shown_items:
                self._shown_items = items
                self._incarnation += 1
            shown = [old for item in items if (old := as_of(item, api_version)) is not None]
            return msgspec.json.encode({"DocumentIncarnation": self._incarnation, "Events": shown})


def check_speed(speed: float) -> float:
    """Return the speed; raises ``SimulatorError`` outside the bounds, within which every year has four digits."""
    if not SPEEDS[0] <= speed <= SPEEDS[1]:
        raise SimulatorError(f"speed: expected {SPEEDS[0]:g} to {SPEEDS[1]:g}, not {speed:g}")
    return speed


def instance(vm: str) -> dict[str, Any]:
    """Return a made-up ``/metadata/instance`` of a VM, the same for each call."""
    seed = hashlib.sha256(vm.encode()).hexdigest()
    subscription = "8d10da13-8125-4ba9-a717-bf7490507b3d"
    group, provider = "fleet", "/providers/Microsoft.Compute"
    return {
        "compute": {
            "azEnvironment": "AzurePublicCloud",
            "location": "westeurope",
            "name": vm,
            "osType": "Linux",
            "placementGroupId": "",
            "platformFaultDomain": str(int(seed[0], 16) % 3),
            "platformUpdateDomain": str(int(seed[1], 16) % 5),
            "resourceGroupName": group,
            "resourceId": f"/subscriptions/{subscription}/resourceGroups/{group}{provider}/virtualMachines/{vm}",
            "subscriptionId": subscription,
            "tagsList": [{"name": "role", "value": "simulated"}],
            "vmId": str(uuid.UUID(seed[:32])),
            "vmScaleSetName": vm.rpartition("_")[0],
            "vmSize": "Standard_D2s_v5",
            "zone": "1",
        }
    }
