"""What every sink must keep to, as functions that the tests of another package can call (docs/python-api.md)."""

from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from notbefore.core.clock import Instant
from notbefore.core.delivery import Routing, Terms, deliveries
from notbefore.core.document import PLATFORM, REBOOT, SCHEDULED, STARTED, parse
from notbefore.core.lifecycle import diff
from notbefore.core.record import Record, Vm
from notbefore.core.routing import Route
from notbefore.core.tracked import Observation, Tracked
from notbefore.courier.message import Message, Receipt
from notbefore.errors import SendError

_BEGIN = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
_EVENT = {
    "EventId": "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
    "EventStatus": SCHEDULED,
    "EventType": REBOOT,
    "ResourceType": "VirtualMachine",
    "Resources": ["WestNO_0"],
    "NotBefore": "Sun, 01 Mar 2026 12:15:00 GMT",
    "EventSource": PLATFORM,
}


def messages(*, exercise: bool = False) -> list[Message]:
    """A Reboot of this VM: announced, started and finished, as a sink is given them; ``exercise``: of a drill."""
    vm, routing = Vm(name="WestNO_0"), Routing((Route(sinks=("it",), announce_by="all"),), {"it": Terms()})
    tracked = Tracked()
    found: list[Message] = []
    started = {**_EVENT, "EventStatus": STARTED, "NotBefore": ""}
    for second, listed in enumerate(([], [_EVENT], [started], [])):
        document = parse(msgspec.json.encode({"DocumentIncarnation": second, "Events": listed}))
        time = _BEGIN + timedelta(seconds=second)
        step = diff(tracked, document, Observation(Instant(time, uptime=float(second), date=time), vm.name))
        tracked = step.tracked
        for change in step.changes:
            found += map(Message.of, deliveries(change, Record.of(change, vm, exercise=exercise).line(), routing, vm))
    return found


def check_accepts(make: Callable[[], Any]) -> None:
    """Send each message through a new sink, whose receiver accepts them; raises ``AssertionError``."""
    sink = make()
    for message in messages():
        receipt = sink.send(message)
        if not isinstance(receipt, Receipt):
            raise AssertionError(  # noqa: TRY004 - for a test it is a failure
                f"send has to return a Receipt once the receiver has accepted, not {receipt!r}"
            )
    sink.close()


def check_marks_exercises(make: Callable[[], Any], received: Callable[[], str]) -> None:
    """Send what a drill sends; raises ``AssertionError`` where ``received()``, all that came, does not say so."""
    sink = make()
    sink.send(messages(exercise=True)[0])
    sink.close()
    if "exercise" not in received().casefold():
        raise AssertionError("what a drill sends has to say that it is an exercise: in message.title and in the body")


def check_refuses(make: Callable[[], Any], *, permanent: bool, secrets: Iterable[str] = ()) -> None:
    """Send a message through a new sink, whose receiver does not accept it; raises ``AssertionError``.

    ``permanent``: nor would it tomorrow (a wrong token), so that it is not tried again; a receiver that is busy or down
    accepts it later. ``secrets``: none of them may be in the text of the error.
    """
    sink = make()
    try:
        sink.send(messages()[0])
    except SendError as error:
        if error.permanent is not permanent:
            raise AssertionError(f"permanent has to be {permanent}: {error}") from None
        if any(secret in str(error) for secret in secrets):
            raise AssertionError("the error shows a secret") from None
    else:
        raise AssertionError("send has to raise SendError where the receiver does not accept")
    finally:
        sink.close()
