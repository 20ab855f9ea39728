"""Messages for sinks: a change of a fleet's VM, as the agent would record it."""

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import msgspec

from notbefore.config.sinks import Links, Messages, SinkConfig
from notbefore.core.delivery import deliveries
from notbefore.core.message import Message
from notbefore.core.record import Vm
from notbefore.core.routing import Route, Routing, Terms
from notbefore.courier.sink import Receipt, Sink
from notbefore.courier.sinks import make
from notbefore.errors import SendError
from notbefore.wording.records import record_of
from support.azure import ME, last_change

VM = Vm(
    name=ME,
    vm_id="02aab8a4-74ef-476e-8182-f6d2ba4166a6",
    resource_id="/subscriptions/s-1/resourceGroups/rg-1/providers/Microsoft.Compute/virtualMachines/WestNO_0",
    subscription_id="s-1",
    resource_group="rg-1",
    location="westeurope",
    zone="2",
    scale_set="WestNO",
)
LINKS = Links(
    dashboard="https://grafana.example.org/d/x?a=1&b=2", runbook="https://wiki.example.org/r"
)


def message(
    *looks: dict[str, Any] | None,
    seconds: Sequence[float] = range(1, 9),
    vm: Vm = VM,
    kind: str | None = None,
    exercise: bool = False,
    **fields: Any,
) -> Message:
    """The message about the last change of an event that was listed with these fields.

    ``None``: not listed.

    ``seconds``: when it was listed so.
    """
    last = last_change(*(looks or ({},)), seconds=seconds)
    line = record_of(last, vm, exercise=exercise).line()
    (delivery,) = deliveries(
        last, line, Routing((Route(sinks=("it",), announce_by="all"),), {"it": Terms()}), vm
    )
    found = Message.of(delivery, last.time)
    return msgspec.structs.replace(found, **({"kind": kind} if kind else {}), **fields)


def sink_of(config: SinkConfig, messages: Messages = Messages()) -> Sink:  # noqa: B008 - frozen
    """The sink as the courier would make it."""
    return make("it", config, messages)


def sent(config: SinkConfig, *messages: Message) -> list[Receipt]:
    """Send messages, or one, through the sink as the courier would make it.

    Returns what it was given for each.
    """
    with closing(sink_of(config, Messages(links=LINKS))) as sink:
        return [sink.send(one) for one in messages or (message(),)]


def outcomes(sink: Sink, *messages: Message) -> list[Receipt | SendError]:
    """Send messages, or one, and close the sink; returns what came of each."""
    found = list[Receipt | SendError]()
    with closing(sink):
        for one in messages or (message(),):
            try:
                found.append(sink.send(one))
            except SendError as error:
                found.append(error)
    return found


def recording(one: Message, **fields: Any) -> Message:
    """The message with other fields in its record."""
    return msgspec.structs.replace(one, content=msgspec.structs.replace(one.record, **fields))
