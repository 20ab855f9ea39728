"""``Heartbeats`` sends records by which a fleet knows that the agent of this VM works."""

from notbefore import __version__
from notbefore.agent.runtime import Published, Runtime
from notbefore.agent.state import AgentState
from notbefore.core.delivery import heartbeat_delivery
from notbefore.store.store import Store
from notbefore.wording.records import heartbeat_of


class Heartbeats:
    """The main thread calls ``send_due`` in each turn of its loop."""

    def __init__(self, runtime: Published[Runtime], state: AgentState, store: Store) -> None:
        self._runtime = runtime
        self._state = state
        self._store = store
        self._due: dict[str, float] = {}  # of the next one, by sink, in seconds since the boot

    def send_due(self) -> None:
        """Send the due heartbeats: one soon after the start, then one per interval.

        Sends none while the name of this VM is unknown.
        """
        vm_name = self._state.snapshot.vm_name
        if vm_name is None:
            return

        uptime = self._state.clock.boot_time()
        for sink, settings in self._runtime.current.config.sinks.items():
            if settings.event_hub is None or settings.event_hub.heartbeat is None:
                continue
            if uptime < self._due.get(sink, 0.0):
                continue

            interval = settings.event_hub.heartbeat.seconds
            self._due[sink] = uptime + interval
            self._send(sink, vm_name, interval)

    def _send(self, sink: str, vm_name: str, interval: float) -> None:
        """Send a heartbeat to ``sink``; the next one follows after ``interval`` seconds."""
        snapshot = self._state.snapshot
        now = self._state.clock.now()
        listed = tuple(tracked.event.event_id for tracked in snapshot.state.tracked.events.values())
        line = heartbeat_of(snapshot.vm, listed, __version__, now, interval).line()
        created = now.timestamp()
        delivery = heartbeat_delivery(sink, vm_name, line, created, interval)
        self._store.put([delivery])
