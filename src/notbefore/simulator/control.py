"""The requests that drive a running simulator over HTTP. No HTTP here: bodies in, answers out.

Each request is one JSON object. Its size, numbers and names are bounded, and an unknown key is an
error.
"""

from ipaddress import ip_address
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta, Struct

from notbefore.core.text import one_of
from notbefore.simulator.state import FASTEST, NAMED, SLOWEST, SimulatorState

EVENTS_PATH: Final = "/simulator/events"
FAULTS_PATH: Final = "/simulator/faults"
CLEAR_PATH: Final = "/simulator/clear"
PATHS: Final = (EVENTS_PATH, FAULTS_PATH, CLEAR_PATH)
MAX_REQUEST: Final = 64 * 1024  # bytes of a body

Word = Annotated[str, Meta(max_length=60)]
T = TypeVar("T", bound=Struct)
ResourceName = Annotated[str, Meta(min_length=1, max_length=128)]


class EventRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of ``POST /simulator/events``: a scenario to play."""

    scenario: Word
    resources: Annotated[tuple[ResourceName, ...], Meta(max_length=500)] = ()  # the first VM
    cancel: bool = False  # the event is canceled halfway to NotBefore
    # None: the speed of the simulator
    speed: Annotated[float, Meta(ge=SLOWEST, le=FASTEST)] | None = None


class FaultRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of ``POST /simulator/faults``: the next answers fail."""

    kind: Word
    value: float | None = None  # a status or seconds; None: the default of the kind
    times: Annotated[int, Meta(ge=1, le=1_000)] = 1


class ClearRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of ``POST /simulator/clear``: it has no keys."""


def may_drive(address: str) -> bool:
    """Whether a client with this address may drive the simulator: only one on this machine."""
    return ip_address(address).is_loopback


def carry_out(state: SimulatorState, path: str, body: bytes) -> dict[str, str]:
    """Do what a request to one of ``PATHS`` says; return the answer.

    Raises ``ValueError`` with the mistake in words.
    """
    if path == EVENTS_PATH:
        return _start(state, _decoded(body, EventRequest))
    if path == FAULTS_PATH:
        fault = _decoded(body, FaultRequest)
        state.fault(fault.kind, fault.value, fault.times)
        return {}
    _decoded(body, ClearRequest)
    state.clear()
    return {}


def _decoded(body: bytes, request_type: type[T]) -> T:
    """Return the request in a body; an empty body is an empty object."""
    try:
        return msgspec.json.decode(body or b"{}", type=request_type)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"malformed body: {error}") from None


def _start(state: SimulatorState, request: EventRequest) -> dict[str, str]:
    scenario = NAMED.get(request.scenario.lower())
    if scenario is None:
        raise ValueError(f"no scenario {request.scenario!r}{one_of(request.scenario, NAMED)}")
    event_id = state.start(
        scenario.name,
        resources=request.resources,
        cancel=request.cancel,
        speed=request.speed,
    )
    return {"EventId": event_id}
