"""The requests of commands to the owner of a state directory, and the replies.

While an agent runs, a command asks it over its socket. Without one, the command opens the store
under the same lock.
"""

import time
from collections.abc import Sequence
from typing import Final, Literal

from msgspec import Raw, Struct
from msgspec.structs import replace

from notbefore.core.delivery import Delivery, DeliveryState
from notbefore.core.lifecycle import OUTCOMES
from notbefore.core.record import Vm
from notbefore.errors import NotBeforeError
from notbefore.store.file import StoredChange
from notbefore.store.store import Store

LOST: Final = ("expired", "withdrawn", "overflowed", "dropped")  # results of a ``Ledger``


class OutboxRequest(Struct, frozen=True, forbid_unknown_fields=True, tag="outbox", tag_field="ask"):
    """List deliveries (``show``), send them again (``retry``), or delete them (``drop``).

    ``ids``: the beginnings of delivery ids, one delivery each; without any, the others choose, if
    set.
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


def answer(store: Store, request: Request) -> Reply:
    """Carry out a request.

    Raises ``NotBeforeError`` for an id that fits no delivery, or more than one.
    """
    if isinstance(request, HistoryRequest):
        history = store.history(request.since, request.limit)
        records = tuple(Raw(record) for record in history.records)
        return HistoryReply(records, cut=history.was_cut, problem=history.problem)
    if isinstance(request, ExerciseRequest):
        _exercise(store, request)
        request = OutboxRequest("show", event_key=request.event_key)
    return answer_outbox(store, request)


def _exercise(store: Store, request: ExerciseRequest) -> None:
    with store.opened() as (outbox, now):
        wanted = {one.sink for step in request.steps for one in step.deliveries}
        if unknown := wanted.difference(outbox.terms or ()):
            raise NotBeforeError(
                f"the agent does not know the sink {', '.join(sorted(unknown))}: reload it first"
            )
        for (
            step
        ) in request.steps:  # delivered like real changes, but not part of the state or the history
            outbox.take(step.change, step.deliveries, now, time.time())


def answer_outbox(store: Store, request: OutboxRequest) -> OutboxReply:
    """Carry out a request to the outbox; see ``answer``."""
    state = store.state
    listed = state.tracked.events.keys()
    with store.opened() as (outbox, now):
        rows = [] if request.ids else outbox.rows.chosen(request.state, request.sink)
        rows = [row for row in rows if request.event_key in (None, row.event_key)]
        for prefix in request.ids:
            matching = [row for row in outbox.rows.chosen() if row.delivery_id.startswith(prefix)]
            if len(matching) != 1:
                words = "Several delivery ids start" if matching else "No delivery id starts"
                raise NotBeforeError(
                    f"{words} with {prefix!r}. `notbefore outbox list` shows the ids."
                )
            # two ids may begin the same delivery id
            rows += [row for row in matching if row not in rows]
        done = left_out = 0
        if request.action == "retry" and not request.ids:
            # these could alarm somebody, and no later message would correct them
            ended = {row.lane for row in outbox.rows.chosen() if row.kind in OUTCOMES}
            over = {
                row.delivery_id
                for row in rows
                if row.event_key not in listed and row.stays_open(ended)
            }
            rows, left_out = [row for row in rows if row.delivery_id not in over], len(over)
        ids = [row.delivery_id for row in rows]
        if request.action == "retry":
            done = outbox.retry(ids, now)
        elif request.action == "drop":
            done = outbox.drop(ids)
        pauses = outbox.rows.paused  # pauses that receivers have asked for
        rows = [replace(row, due=max(row.due, pauses.get(row.sink, row.due))) for row in rows]
        counts = outbox.rows.ledger.counts.items()
        lost = sum(count for (_, result), count in counts if result in LOST)
    return OutboxReply(
        tuple(rows), time.time() - now, tuple(listed), done, left_out, lost, state.vm
    )
