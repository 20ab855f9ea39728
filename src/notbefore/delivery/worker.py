"""``Worker``: the one thread of a sink. It makes the sink on first use, sends what it is given, and says what came."""

import logging
import queue
import threading
import time
from collections.abc import Callable

import msgspec
from msgspec import Struct

from notbefore.delivery.message import Message, Receipt, Sink
from notbefore.errors import NotBeforeError, SendError
from notbefore.events.delivery import Delivery

log = logging.getLogger("notbefore.delivery")


class Attempt(Struct, frozen=True):
    """What came of one attempt: a receipt, or an error."""

    delivery: Delivery
    receipt: Receipt | None
    error: SendError | None = None


class Worker:
    """``report`` is called in the worker's thread with each attempt; ``make`` makes the sink there."""

    def __init__(self, name: str, make: Callable[[], Sink], report: Callable[[Attempt], None]) -> None:
        self.name = name
        self.quick = False  # the last attempt took next to no time: more may be given at once
        self._make = make
        self._report = report
        self._jobs: queue.SimpleQueue[Delivery | None] = queue.SimpleQueue()
        self._waiting: dict[str, Delivery] = {}
        self._since: float | None = None
        self._current: Delivery | None = None
        self._thread = threading.Thread(target=self._run, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def give(self, delivery: Delivery) -> None:
        """Have it sent after what was given before."""
        self._waiting[delivery.delivery_id] = delivery
        self._jobs.put(delivery)

    def leave(self) -> None:
        """End the thread after what was given."""
        self._jobs.put(None)

    def abandon(self) -> list[Delivery]:
        """Give up on what hangs, whenever its thread may end; returns what was given and not begun."""
        current, left = self._current, list(self._waiting.values())
        self._waiting = {}
        self.leave()
        return [one for one in left if one is not current]

    @property
    def busy(self) -> int:
        """How many deliveries it was given and has not answered for."""
        return len(self._waiting)

    @property
    def alive(self) -> bool:
        """The thread has not ended."""
        return self._thread.is_alive()

    def hangs(self, limit: float) -> Delivery | None:
        """The delivery on which it has been for more than ``limit`` seconds."""
        since, current = self._since, self._current
        return current if since is not None and time.monotonic() - since > limit else None

    def _run(self) -> None:
        sink: Sink | None = None
        while (delivery := self._jobs.get()) is not None:
            if delivery.delivery_id not in self._waiting:  # abandoned: another has it
                continue
            self._current, self._since = delivery, time.monotonic()
            try:
                if sink is None:
                    sink = self._make()
                attempt = Attempt(delivery, sink.send(Message.of(delivery)))
            except SendError as error:
                attempt = Attempt(delivery, None, error)
            except msgspec.DecodeError as error:
                attempt = Attempt(delivery, None, SendError(f"the record cannot be read: {error}", permanent=True))
            except NotBeforeError as error:  # a secret that cannot be read, say: somebody will mend it
                attempt = Attempt(delivery, None, SendError(str(error)))
            except Exception as error:  # a sink's library may raise anything; the others must go on
                log.exception("sink %s: this should not have happened", self.name)
                attempt = Attempt(delivery, None, SendError(f"{type(error).__name__}: {error}"))
            self.quick = time.monotonic() - self._since < 0.25  # noqa: PLR2004 - a quarter of a second
            self._since = self._current = None
            expected = self._waiting.pop(delivery.delivery_id, None) is not None
            if expected or attempt.receipt is not None:  # given up and failed late: it is tried again already
                self._report(attempt)
        if sink is not None:
            sink.close()
