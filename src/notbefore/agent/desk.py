"""``AgentDesk``: answers the requests that commands send to the agent through its socket."""

from typing import Protocol

from msgspec import Raw

from notbefore.process.control_socket import ControlReply, ControlRequest
from notbefore.process.operations import (
    ExerciseRequest,
    HistoryReply,
    HistoryRequest,
    OutboxReply,
    OutboxRequest,
    Reply,
    Request,
    answer_outbox,
    exercise,
)
from notbefore.store.store import Store


class Approvals(Protocol):
    """The part that approves events for operators (``approver.Approver``)."""

    def answer(self, request: ControlRequest, user: str) -> ControlReply:
        """Answer a request of ``user``; may wait for IMDS.

        Raises ``NotBeforeError`` to refuse it.
        """


class AgentDesk:
    """Approvals go to ``approvals``, all else is answered from ``store``."""

    def __init__(self, approvals: Approvals, store: Store) -> None:
        self._approvals = approvals
        self._store = store

    def answer(self, request: ControlRequest | Request, user: str) -> ControlReply | Reply:
        """Answer a request of ``user``. Raises ``NotBeforeError`` to refuse it."""
        if isinstance(request, ControlRequest):
            return self._approvals.answer(request, user)
        return answer(self._store, request)


def answer(store: Store, request: Request) -> Reply:
    """Carry out a request; see ``operations.answer_outbox`` for the errors."""
    if isinstance(request, HistoryRequest):
        history = store.history(request.since, request.limit)
        records = tuple(Raw(record) for record in history.records)
        return HistoryReply(records, cut=history.was_cut, problem=history.problem)
    if isinstance(request, ExerciseRequest):
        exercise(store, request)
        request = OutboxRequest("show", event_key=request.event_key)
    return outbox_reply(store, request)


def outbox_reply(store: Store, request: OutboxRequest) -> OutboxReply:
    """Carry out a request to the agent's outbox; see ``operations.answer_outbox``."""
    state = store.state
    return answer_outbox(store, request, state.tracked.events.keys(), state.vm)
