"""``Agent``: the always-on process. It creates its parts, connects them, and supervises them until it is stopped.

Threads: main (signals, the courier, noting that the agent runs), disk (the state file), poll (IMDS), freeze (only
while an event may start or is started), stdout (records), control (commands), approve (only with ``--allow-approval``),
otlp and pings (only if configured), and those of the HTTP server. No thread waits for the network of another.
"""

import logging
import platform
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from msgspec import structs

from notbefore import __version__
from notbefore.agent.approver import ApprovalSettings, Approver
from notbefore.agent.control_socket import ControlSocket
from notbefore.agent.freeze import FreezeMeter
from notbefore.agent.operations import answer
from notbefore.agent.polling import Polling
from notbefore.agent.state import AgentState
from notbefore.agent.thread_guard import ThreadGuard
from notbefore.agent.tracker import Tracker
from notbefore.agent.view import AgentView, InUse
from notbefore.config.model import Config, HeartbeatConfig, Otlp
from notbefore.core.delivery import heartbeat_delivery, targets_of
from notbefore.core.record import Heartbeat
from notbefore.courier.supervisor import Supervisor, make_orders
from notbefore.errors import ConfigError
from notbefore.logs import set_up
from notbefore.metrics.totals import ConfigFigures, Figures, increased
from notbefore.process.clock import Clock
from notbefore.process.main_thread import MainThread, exit_at_once
from notbefore.process.stdout import StdoutWriter
from notbefore.process.systemd import SystemdNotifier
from notbefore.store.store import Store
from notbefore.web.server import HttpServer

if TYPE_CHECKING:  # most agents send no pings
    from notbefore.agent.pings import Pings

STOP_PATIENCE: Final = 1.0  # seconds for a thread to end; what it has not committed by then is lost

log = logging.getLogger("notbefore.agent")


class Agent:
    """Runs until SIGTERM or SIGINT; SIGHUP reads the configuration again.

    Raises ``StoreError``, ``ListenError`` or ``ConfigError`` if it cannot start, and nothing afterwards.
    """

    def __init__(self, config: Config, reload: Callable[[], Config], *, allow_approval: bool = False) -> None:
        self._config = config  # a reload replaces it, so the parts ask for it each time
        self._reload = reload
        self._allow_approval = allow_approval
        self._clock = clock = Clock()
        self._config_figures = ConfigFigures(loaded=clock.time())
        self._exports: dict[tuple[str, str], int] = {}  # over OTLP, by signal and result
        self._exporter: Any = None  # otlp.exporter.Exporter, if OTLP is configured
        self._main = MainThread(self._hang_up)

        self._errors = ThreadGuard(self._main.wake)
        self._store = Store(Path(config.state.dir), clock, self._main.wake)
        self._supervisor = Supervisor(
            make_orders(config),
            self._store,
            lambda: self._store.disk.lock.descriptor,
            lambda: self._state.now().timestamp(),
        )
        self._stdout = StdoutWriter()
        self._state = AgentState(self._store, clock, lambda: self._config, self._stdout, self._changed)
        self._freeze_meter = FreezeMeter(clock)
        self._tracker = Tracker(self._state, self._store, self._freeze_meter)
        self._polling = Polling(config, self._tracker, self._clock, self._errors)
        self._approver = Approver(self._state, self._approval_settings, self._errors)
        self._control = ControlSocket(self._store.path.parent, self._approver.answer, partial(answer, self._store))
        self._next_heartbeat: dict[str, float] = {}  # sink -> seconds since the boot

        def in_use() -> InUse:
            approval = self._approval_settings()
            return InUse(self._config, self._polling, approval, self._figures, self._supervisor.trouble)

        self._view = AgentView(self._state, self._store, in_use)
        self._pings: Pings | None = None  # if a heartbeat is configured
        self._server = HttpServer(config.server, self._view.app)
        self._systemd = SystemdNotifier()

    # ---- values for the parts, and calls between them

    def _approval_settings(self) -> ApprovalSettings:
        config, endpoint = self._config, self._polling.endpoint
        return ApprovalSettings(config.approval, endpoint, config.imds.api_version, self._allow_approval)

    def _figures(self) -> Figures:
        vm = self._state.snapshot.vm
        return Figures(
            version=__version__,
            python=platform.python_version(),
            api_version=self._config.imds.api_version,
            courier=self._supervisor.figures,
            config=self._config_figures,
            store_degraded=self._store.disk.degraded is not None,
            store_damaged=self._store.disk.file.damaged,
            otlp_exports=self._exports.copy(),
            unforeseen=self._errors.count,
            restart_needed=self._supervisor.replaced and bool(self._supervisor.trouble),
            auth_failures=self._server.auth_failures,
            vm=structs.asdict(vm) if vm is not None else {},
            since=self._view.since,
        )

    def _ping(self, heartbeat: HeartbeatConfig | None) -> None:
        """Replace the pings with those that ``heartbeat`` configures; ``None``: send no pings."""
        if self._pings is not None:
            self._pings.stop()
            self._pings = None
        if heartbeat is not None:
            from notbefore.agent.pings import Pings  # noqa: PLC0415 - only if it is configured

            self._pings = Pings(heartbeat, self._view.ping_status, self._errors)
            self._pings.start()

    def _changed(self) -> None:
        """Wake the parts that handle changes. Called from any thread; never waits."""
        self._approver.wake()
        if (exporter := self._exporter) is not None:
            exporter.wake()

    def _send_heartbeats(self) -> None:
        """Send the due heartbeats: one soon after the start, then one per interval; none while the VM is unknown."""
        known, uptime = self._state.snapshot, self._clock.boot_time()
        if known.vm_name is None:
            return
        for sink, config in self._config.sinks.items():
            interval = config.event_hub.heartbeat if config.event_hub is not None else None
            if interval is None or uptime < self._next_heartbeat.get(sink, 0.0):
                continue
            self._next_heartbeat[sink] = uptime + interval.seconds
            now = self._clock.now()
            listed = tuple(event.event.event_id for event in known.state.tracked.events.values())
            line = Heartbeat.of(known.vm, listed, __version__, now, interval.seconds).line()
            made = heartbeat_delivery(sink, known.vm_name, line, now.timestamp(), interval.seconds)
            self._store.put([made])

    def _use_sinks(self) -> None:
        """Route the deliveries that wait for removed sinks again, by the present routes."""
        routing, vm = self._config.routing, self._state.snapshot.vm
        self._store.use_sinks(routing.sinks, lambda row: targets_of(row.record, routing, vm))

    # ---- the life of the process

    def run(self) -> int:
        """Serve and poll; returns the exit code."""
        previous_hook, threading.excepthook = threading.excepthook, self._errors.thread_ended
        with self._main:
            try:
                self._start()
                self._supervise()
            finally:
                self._stop()
                threading.excepthook = previous_hook
        code = int(self._errors.given_up)
        if self._store.disk.hangs:
            exit_at_once(code)
        return code

    def _start(self) -> None:
        self._export(self._config.otlp)
        self._server.start()
        log.info("notbefore %s: watching %s, serving %s", __version__, self._config.imds.endpoint, self._server.url)
        self._stdout.start()
        self._polling.start()
        self._approver.start()
        self._control.start()
        self._ping(self._config.heartbeat)
        self._use_sinks()
        self._systemd.ready()

    def _supervise(self) -> None:
        """Do the main thread's work until a signal stops the agent: state, heartbeats, courier, systemd, signals."""
        stop = False
        while not stop and not self._errors.given_up:
            for name, work in (
                ("main running", self._state.note_running),
                ("main heartbeats", self._send_heartbeats),
                ("main courier", self._supervisor.tick),  # the first call sends what the last process left
                ("main systemd", lambda: self._systemd.notify(self._view.status_line(), alive=self._view.health().ok)),
            ):
                self._errors.attempt(name, work)  # a failure of one does not stop the others
            stop = bool(self._supervisor.successor or self._errors.attempt("main wait", self._wait))

    def _wait(self) -> bool:
        # an idle agent only waits for signals; while an event may start soon, it notes each second that it runs
        imminent = self._freeze_meter.running or self._state.snapshot.state.tracked.interrupting
        idle = 1.0 if imminent else 10.0
        patience = min(self._supervisor.patience, self._systemd.patience, idle)
        return self._main.wait(patience, *self._supervisor.watched)

    def _hang_up(self) -> None:
        """Handle SIGHUP in the main thread: read the configuration, and use it or refuse it."""
        self._systemd.reloading()
        try:
            self._reconfigure(self._reload())
        except ConfigError as error:
            figures = self._config_figures
            self._config_figures = structs.replace(figures, refused=True, reloads=increased(figures.reloads, "failure"))
            log.error("the new configuration is refused, the old one stays in use: %s", error)  # noqa: TRY400 - the text is enough
        finally:
            self._systemd.ready()

    def _reconfigure(self, config: Config) -> None:
        """Use another configuration. If it raises ``ConfigError``, nothing has changed."""
        before, orders = self._config, make_orders(config)
        polling = Polling(config, self._tracker, self._clock, self._errors)
        if (config.server, config.state) != (before.server, before.state):
            log.warning("changed settings of server and state take effect at the next start")
        set_up(config.log.format, config.log.level)
        # first: a courier with the old orders does not know new sinks
        self._supervisor.reconfigure(orders)
        self._config = config  # from here on the new approval rules apply
        self._use_sinks()
        if config.otlp != before.otlp:
            self._export(config.otlp)
        if (config.imds, config.vm) != (before.imds, before.vm):
            self._polling.stop()
            self._polling = polling
            self._polling.start()
        self._approver.start()
        if config.heartbeat != before.heartbeat:
            self._ping(config.heartbeat)
        reloads = increased(self._config_figures.reloads, "success")
        self._config_figures = ConfigFigures(loaded=self._clock.time(), reloads=reloads)
        log.info("configuration reloaded")

    def _export(self, otlp: Otlp | None) -> None:
        """Replace the exporter with the one that ``otlp`` configures; ``None``: do not export."""
        if self._exporter is not None:
            self._exporter.stop(STOP_PATIENCE)
            self._exporter = None
        if otlp is not None:
            from notbefore.courier.http import Http  # noqa: PLC0415 - only if it is configured
            from notbefore.courier.redact import Redactor  # noqa: PLC0415 - as above
            from notbefore.otlp.exporter import Exporter  # noqa: PLC0415 - as above

            self._exporter = Exporter(
                otlp, lambda: (self._view.families(), self._state.snapshot.vm), self._exports, Redactor(), Http
            )

    def _stop(self) -> None:
        self._systemd.stopping()
        self._ping(None)
        self._polling.stop()
        self._control.stop()
        self._approver.stop()
        self._freeze_meter.switch(on=False)
        self._state.write_stop()
        if self._state.snapshot.poll.answered is not None:  # it was polling: the last changes are still to be delivered
            self._supervisor.tick()
        self._supervisor.stop(self._main.wait)
        self._export(None)
        self._stdout.stop(STOP_PATIENCE / 2)
        self._server.stop()
        self._store.close()
