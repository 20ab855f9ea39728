"""Messages for sinks about a change, with the record that the agent would write."""

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
    """Return the message about the last change of an event.

    ``looks``: the fields of the event in each document, or ``None`` if it is not listed.
    ``seconds``: the times of the documents. ``fields``: further fields of the message.
    """
    last = last_change(*(looks or ({},)), seconds=seconds)
    line = record_of(last, vm, exercise=exercise).line()
    routing = Routing((Route(sinks=("it",), announce_by="all"),), {"it": Terms()})
    (delivery,) = deliveries(last, line, routing, vm)
    if kind is not None:
        fields["kind"] = kind
    return msgspec.structs.replace(Message.of(delivery, last.time), **fields)


def sink_of(config: SinkConfig, messages: Messages = Messages()) -> Sink:  # noqa: B008 - frozen
    """Make a sink as the courier does."""
    return make("it", config, messages)


def sent(config: SinkConfig, *messages: Message) -> list[Receipt]:
    """Send messages, by default one, through a new sink, and return the receipts."""
    with closing(sink_of(config, Messages(links=LINKS))) as sink:
        return [sink.send(to_send) for to_send in messages or (message(),)]


def outcomes(sink: Sink, *messages: Message) -> list[Receipt | SendError]:
    """Send messages, by default one, close the sink, and return the receipts or errors."""
    results: list[Receipt | SendError] = []
    with closing(sink):
        for to_send in messages or (message(),):
            try:
                results.append(sink.send(to_send))
            except SendError as error:
                results.append(error)
    return results


def with_record_fields(original: Message, **fields: Any) -> Message:
    """Return the message with other fields in its record."""
    record = msgspec.structs.replace(original.record, **fields)
    return msgspec.structs.replace(original, content=record)
