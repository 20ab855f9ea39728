"""The requests of commands to the owner of a state directory, and the replies.

While an agent or an instance of ``notbefore fleet`` runs, a command asks it over its socket. While
no agent runs, the command opens the agent's store under the same lock.
"""

import time
from collections.abc import Collection, Sequence
from typing import Final, Literal

from msgspec import Raw, Struct
from msgspec.structs import replace

from notbefore.core.delivery import Delivery, DeliveryState
from notbefore.core.lifecycle import OUTCOMES
from notbefore.core.outbox_rows import OutboxRows
from notbefore.core.record import Vm
from notbefore.errors import NotBeforeError
from notbefore.store.file import StoredChange
from notbefore.store.stored_outbox import StoredOutbox

LOST: Final = ("expired", "withdrawn", "overflowed", "dropped")  # results of a ``Ledger``


class OutboxRequest(Struct, frozen=True, forbid_unknown_fields=True, tag="outbox", tag_field="ask"):
    """List deliveries (``show``), send them again (``retry``), or delete them (``drop``).

    ``ids``: the beginnings of delivery ids, one delivery each. Without ids, the other fields choose
    the deliveries.
    """

    action: Literal["show", "retry", "drop"]
    ids: tuple[str, ...] = ()
    state: DeliveryState | None = None
    sink: str | None = None
    event_key: str | None = None


class OutboxReply(Struct, frozen=True):
    """The chosen deliveries. ``done`` of them were changed.

    A retry or drop leaves those that are just being sent.
    """

    rows: tuple[Delivery, ...] = ()
    shift: float = 0.0  # seconds to add to the times of the rows for Unix time by this VM's clock
    listed: tuple[str, ...] = ()  # the keys of the events that are listed now
    done: int = 0
    left_out: int = 0  # dead letters not sent again, because their events are over
    lost: int = 0  # deliveries that have left the outbox without being accepted, in total
    vm: Vm | None = None  # the identity of this VM, as far as IMDS has given it


class HistoryRequest(
    Struct, frozen=True, forbid_unknown_fields=True, tag="history", tag_field="ask"
):
    """The newest changes since a Unix time."""

    since: float | None
    limit: int


class HistoryReply(Struct, frozen=True):
    """Records, oldest first.

    ``cut``: older ones were left out because one reply cannot hold them. ``problem``: why the state
    file could not be read; then only those in memory are here.
    """

    records: tuple[Raw, ...]
    cut: bool = False
    problem: str = ""


class ExerciseRequest(
    Struct, frozen=True, forbid_unknown_fields=True, tag="exercise", tag_field="ask"
):
    """Send the ``steps`` of an exercise."""

    event_key: str
    steps: Sequence[StoredChange]


Request = OutboxRequest | HistoryRequest | ExerciseRequest
Reply = OutboxReply | HistoryReply


def exercise(owner: StoredOutbox, request: ExerciseRequest) -> None:
    """Deliver the steps of an exercise like real changes. Nothing else remembers them.

    Raises ``NotBeforeError`` if a sink is not configured.
    """
    sinks: set[str] = set()
    for step in request.steps:
        sinks.update(delivery.sink for delivery in step.deliveries)
    with owner.opened() as (outbox, now):
        unknown = sinks.difference(outbox.terms or ())
        if unknown:
            names = ", ".join(sorted(unknown))
            raise NotBeforeError(
                f"the running process does not know the sink {names}: reload or restart it first"
            )
        for step in request.steps:
            outbox.take(step.change, step.deliveries, now, time.time())


def answer_outbox(
    owner: StoredOutbox,
    request: OutboxRequest,
    listed: Collection[str],
    vm: Vm | None = None,
) -> OutboxReply:
    """Carry out a request to an outbox.

    ``listed``: the keys of the events that are not over. ``vm``: the VM that the outbox is on.

    Raises ``NotBeforeError`` for an id that fits no delivery, or more than one.
    """
    done = 0
    left_out = 0
    with owner.opened() as (outbox, now):
        chosen = _chosen(outbox.rows, request)
        if request.action == "retry" and not request.ids:
            false_alarms = _false_alarms(outbox.rows, chosen, listed)
            chosen = [row for row in chosen if row.delivery_id not in false_alarms]
            left_out = len(false_alarms)

        ids = [row.delivery_id for row in chosen]
        if request.action == "retry":
            done = outbox.retry(ids, now)
        elif request.action == "drop":
            done = outbox.drop(ids)

        rows = tuple(_with_pause(row, outbox.rows) for row in chosen)
        lost = _lost(outbox.rows)
    return OutboxReply(
        rows=rows,
        shift=time.time() - now,
        listed=tuple(listed),
        done=done,
        left_out=left_out,
        lost=lost,
        vm=vm,
    )


def _chosen(rows: OutboxRows, request: OutboxRequest) -> list[Delivery]:
    """Return the deliveries that a request chooses.

    Raises ``NotBeforeError`` for the beginning of an id that fits no delivery, or more than one.
    """
    if request.ids:
        return _by_prefixes(rows.chosen(), request.ids)
    chosen = rows.chosen(request.state, request.sink)
    if request.event_key is None:
        return chosen
    return [row for row in chosen if row.event_key == request.event_key]


def _by_prefixes(rows: Sequence[Delivery], prefixes: Sequence[str]) -> list[Delivery]:
    """Return the delivery that each prefix names, once."""
    chosen: dict[str, Delivery] = {}  # two prefixes may name the same delivery
    for prefix in prefixes:
        matching = [row for row in rows if row.delivery_id.startswith(prefix)]
        if len(matching) != 1:
            problem = "No delivery id starts"
            if matching:
                problem = "Several delivery ids start"
            advice = "`outbox list` shows the ids."
            raise NotBeforeError(f"{problem} with {prefix!r}. {advice}")
        (row,) = matching
        chosen[row.delivery_id] = row
    return list(chosen.values())


def _false_alarms(
    rows: OutboxRows,
    chosen: Sequence[Delivery],
    listed: Collection[str],
) -> set[str]:
    """Return the ids of deliveries that would open an alarm which no later message closes.

    Such a delivery is about an event that is over.
    """
    ended = {row.lane for row in rows.chosen() if row.kind in OUTCOMES}
    over = [row for row in chosen if row.event_key not in listed]
    return {row.delivery_id for row in over if row.stays_open(ended)}


def _with_pause(row: Delivery, rows: OutboxRows) -> Delivery:
    """Return a delivery that is due at the earliest when the pause of its receiver ends."""
    return replace(row, due=max(row.due, rows.paused.get(row.sink, row.due)))


def _lost(rows: OutboxRows) -> int:
    """Return how many deliveries have left the outbox without being accepted."""
    counts = rows.ledger.counts.items()
    return sum(count for (_, result), count in counts if result in LOST)
