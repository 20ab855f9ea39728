"""``Heartbeats``: where a sink asks for signs of life of this VM, one is put into the outbox at each interval."""

from collections.abc import Callable, Mapping

from notbefore import __version__
from notbefore.agent.state import AgentState
from notbefore.config.sinks import SinkConfig
from notbefore.core.delivery import heartbeat_delivery
from notbefore.core.record import Heartbeat
from notbefore.store.store import StoredOutbox


class Heartbeats:
    """``sinks`` gives those in use, by name."""

    def __init__(self, state: AgentState, outbox: StoredOutbox, sinks: Callable[[], Mapping[str, SinkConfig]]) -> None:
        self._state = state
        self._clock = state.clock
        self._outbox = outbox
        self._sinks = sinks
        self._next: dict[str, float] = {}  # sink -> monotonic seconds

    def send_due(self) -> None:
        """Send what is due: the first soon after the start, then one each interval; nothing while the VM is unknown."""
        known, monotonic = self._state.snapshot, self._clock.monotonic()
        if known.vm_name is None:
            return
        for sink, config in self._sinks().items():
            interval = config.event_hub.heartbeat if config.event_hub is not None else None
            if interval is None or monotonic < self._next.get(sink, 0.0):
                continue
            self._next[sink] = monotonic + interval.seconds
            now = self._clock.now()
            listed = tuple(event.event.event_id for event in known.state.tracked.events.values())
            line = Heartbeat.of(known.vm, listed, __version__, now, interval.seconds).line()
            self._outbox.put([heartbeat_delivery(sink, known.vm_name, line, now.timestamp(), interval.seconds)])
