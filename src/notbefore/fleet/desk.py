"""``FleetDesk``: answers the requests that commands send to an instance through its socket."""

from notbefore.errors import NotBeforeError
from notbefore.fleet.approver import FleetApprover
from notbefore.fleet.consumer import Consumer
from notbefore.fleet.outbox import FleetOutbox
from notbefore.process.control_socket import ControlReply, ControlRequest
from notbefore.process.operations import (
    ExerciseRequest,
    OutboxRequest,
    Reply,
    Request,
    answer_outbox,
    exercise,
)


class FleetDesk:
    """Answers from the outbox of the partitions that this instance reads.

    A changed delivery is in the next snapshot of its partition. An exercise belongs to no
    partition, so no snapshot has it, and it ends with this process.
    """

    def __init__(self, outbox: FleetOutbox, consumer: Consumer, approver: FleetApprover) -> None:
        self._outbox = outbox
        self._consumer = consumer
        self._approver = approver

    def answer(self, request: ControlRequest | Request, user: str) -> ControlReply | Reply:
        """Answer a request of ``user``. Raises ``NotBeforeError`` to refuse it."""
        if isinstance(request, ControlRequest):
            return self._approver.answer(request, user)
        if isinstance(request, ExerciseRequest):
            exercise(self._outbox, request)
            request = OutboxRequest("show", event_key=request.event_key)
        if not isinstance(request, OutboxRequest):
            raise NotBeforeError(
                "this is an instance of `notbefore fleet`: only an agent has that, so ask on a VM"
            )
        return answer_outbox(self._outbox, request, self._consumer.state().open_keys)
