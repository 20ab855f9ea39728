"""What commands ask of the owner of a state directory, and the answers: over the agent's socket while it runs.

Without an agent the command opens the store itself, under the same lock, and asks it the same.
"""

import time
from collections.abc import Callable
from typing import Final, Literal

from msgspec import Raw, Struct

from notbefore.core.delivery import MessageKind, Routing
from notbefore.core.outbox import Row, RowState
from notbefore.core.record import view
from notbefore.core.routing import Severity
from notbefore.store.store import ExerciseAttempt, Store, StoredChange

PAGE_BYTES: Final = 1024 * 1024  # of history in one reply: a whole one would be many times the agent's size


class OutboxRequest(Struct, frozen=True, forbid_unknown_fields=True, tag="outbox", tag_field="ask"):
    """Look at deliveries (``show``), send them again (``retry``), or delete them (``drop``).

    Which: those whose ids begin with one of ``ids``; without any, those of a ``state`` and a ``sink``.
    """

    action: Literal["show", "retry", "drop"]
    ids: tuple[str, ...] = ()
    state: RowState | None = None
    sink: str | None = None


class OutboxRow(Struct, frozen=True):
    """One delivery, as it is shown. Times are Unix seconds by the clock of this VM."""

    delivery_id: str
    event_key: str
    sink: str
    kind: MessageKind
    severity: Severity
    state: RowState
    created: float
    due: float
    expires: float
    attempts: int
    error: str
    note: str
    ahead: tuple[str, ...]
    fallback: tuple[str, ...]
    others: tuple[str, ...]
    expires_with_event: bool
    listed: bool  # its event is listed now
    record: Raw

    @classmethod
    def of(cls, row: Row, *, listed: bool, shift: float) -> "OutboxRow":
        """``shift``: by how much Unix seconds are ahead of the times of a row."""
        return view(
            cls,
            row,
            row.delivery,
            created=row.since + shift,
            due=row.due + shift,
            expires=row.expires + shift,
            listed=listed,
            record=Raw(row.delivery.record),
        )


class OutboxReply(Struct, frozen=True):
    """The deliveries that were meant; of these ``done`` were changed, and the others are being sent just now.

    ``unclear``: one of the ids, for which there is no delivery, or more than one (``several``).
    """

    rows: tuple[OutboxRow, ...] = ()
    done: int = 0
    left_out: int = 0  # dead letters that announce events that are over
    unclear: str = ""
    several: bool = False


class HistoryRequest(Struct, frozen=True, forbid_unknown_fields=True, tag="history", tag_field="ask"):
    """The newest changes since a Unix time. ``before``: the ``rest`` of an earlier reply, to go on from there."""

    since: float | None
    limit: int
    before: int | None = None


class HistoryReply(Struct, frozen=True):
    """Records, oldest first. ``rest``: where older ones begin, which another request is to ask for."""

    records: tuple[Raw, ...]
    rest: int | None = None


class ExerciseRequest(Struct, frozen=True, forbid_unknown_fields=True, tag="exercise", tag_field="ask"):
    """Send a step of an exercise (``change``), say what has become of it, or ``end`` it: drop what still waits."""

    event_key: str
    change: StoredChange | None = None
    end: bool = False


class ExerciseReply(Struct, frozen=True):
    """The attempts so far. ``due``: seconds until the next one; ``None``: there will be none."""

    attempts: tuple[ExerciseAttempt, ...] = ()
    due: float | None = None


Request = OutboxRequest | HistoryRequest | ExerciseRequest
Reply = OutboxReply | HistoryReply | ExerciseReply


class Operations:
    """Answers for a store. ``routing``: of the configuration in use."""

    def __init__(self, store: Store, routing: Callable[[], Routing]) -> None:
        self._store = store
        self._routing = routing

    def answer(self, request: Request) -> Reply:
        """Do what is asked; never raises."""
        if isinstance(request, OutboxRequest):
            return self._outbox(request)
        if isinstance(request, HistoryRequest):
            found = self._store.history(request.since, request.limit, PAGE_BYTES, request.before)
            return HistoryReply(tuple(map(Raw, found.records)), found.rest)
        return self._exercise(request)

    def _exercise(self, request: ExerciseRequest) -> ExerciseReply:
        attempts = self._store.exercise(request.event_key, request.change)
        with self._store.outbox() as (outbox, now):
            rows = [row for row in outbox.rows() if row.delivery.event_key == request.event_key]
            if request.end:
                outbox.drop([row.id for row in rows])
        due = min((row.due for row in rows if row.state == "pending"), default=None)
        return ExerciseReply(tuple(attempts), None if due is None else due - now)

    def _outbox(self, request: OutboxRequest) -> OutboxReply:
        listed = self._store.load().tracked.events.keys()
        with self._store.outbox() as (outbox, now):
            rows = [] if request.ids else list(outbox.rows(request.state, request.sink))
            for prefix in request.ids:
                matching = [row for row in outbox.rows() if row.id.startswith(prefix)]
                if len(matching) != 1:
                    return OutboxReply(unclear=prefix, several=bool(matching))
                rows += matching
            shift = time.time() - now
            shown = [OutboxRow.of(row, listed=row.delivery.event_key in listed, shift=shift) for row in rows]
            done = left_out = 0
            if request.action == "retry" and not request.ids:
                # they could wake somebody, and no later message corrects them
                timely = [one for one in shown if one.listed or not one.expires_with_event]
                shown, left_out = timely, len(shown) - len(timely)
            ids = [one.delivery_id for one in shown]
            if request.action == "retry":
                expire_after = {sink: terms.expire_after for sink, terms in self._routing().sinks.items()}
                done = outbox.retry(ids, now, expire_after)
            elif request.action == "drop":
                done = outbox.drop(ids)
        return OutboxReply(tuple(shown), done, left_out)
