"""``Agent``: the always-on process. It creates its parts, connects them, and supervises them.

Threads: main (signals, the courier, noting that the agent runs), disk (the state file), poll
(IMDS), freeze (only while an event may start or is started), stdout (records), control (commands),
approve (only with ``--allow-approval``), otlp and pings (only if configured), and those of the HTTP
server. No thread waits for the network of another.
"""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from notbefore import __version__
from notbefore.agent.approver import Approver
from notbefore.agent.desk import AgentDesk
from notbefore.agent.figures import ProcessFigures
from notbefore.agent.freeze import FreezeMeter
from notbefore.agent.heartbeats import Heartbeats
from notbefore.agent.polling import Polling
from notbefore.agent.runtime import Published, Runtime, version_to_ask
from notbefore.agent.state import AgentState
from notbefore.agent.thread_guard import ThreadGuard
from notbefore.agent.tracker import Tracker
from notbefore.agent.view import AgentView
from notbefore.config.model import Config, HeartbeatConfig, Otlp
from notbefore.config.otel import is_disabled, resolved
from notbefore.core.delivery import Delivery, Targets, targets_of
from notbefore.courier.supervisor import Supervisor, make_orders
from notbefore.errors import ConfigError
from notbefore.imds.client import check_endpoint
from notbefore.logs import set_up
from notbefore.net.redact import Redactor
from notbefore.otlp.exporter import Exporter
from notbefore.process.clock import Clock
from notbefore.process.control_socket import ControlSocket
from notbefore.process.main_thread import MainThread, exit_at_once
from notbefore.process.stdout import StdoutWriter
from notbefore.process.systemd import SystemdNotifier
from notbefore.store.store import Store
from notbefore.web.access import Access
from notbefore.web.server import HttpServer

if TYPE_CHECKING:
    from notbefore.agent.pings import Pings

FLUSH_PATIENCE: Final = 1.0  # seconds to write the last records, and to send the last metrics
IDLE_INTERVAL: Final = 10.0  # seconds between two notes that the agent runs
ALERT_INTERVAL: Final = 1.0  # the same while an event may start soon

log = logging.getLogger("notbefore.agent")


class Agent:
    """Runs until SIGTERM or SIGINT; SIGHUP reads the configuration again, with ``read_config``.

    ``check_arguments``: see ``Supervisor``.

    Raises ``StoreError``, ``ListenError`` or ``ConfigError`` if it cannot start. Once it runs, it
    raises nothing.
    """

    def __init__(
        self,
        config: Config,
        read_config: Callable[[], Config],
        *,
        allow_approval: bool = False,
        check_arguments: Sequence[str] = (),
    ) -> None:
        check_endpoint(config.imds.endpoint)
        runtime = Published(Runtime(config, config.imds.endpoint, allow_approval))
        clock = Clock()
        self._read_config = read_config
        self._runtime = runtime
        self._main = MainThread(self._reload)
        self._errors = ThreadGuard(self._main.wake)
        self._systemd = SystemdNotifier()

        # the memory of the agent
        self._store = Store(Path(config.state.dir), clock, self._main.wake)
        self._stdout = StdoutWriter(disk=self._store.disk)
        self._state = AgentState(self._store, clock, runtime, self._stdout.write)

        # from IMDS to the state
        self._freeze_meter = FreezeMeter(clock)
        self._tracker = Tracker(self._state, self._store, self._freeze_meter)
        self._polling = Polling(runtime, self._tracker, clock, self._errors)

        # from the state to the receivers, and to IMDS
        self._heartbeats = Heartbeats(runtime, self._state, self._store)
        self._supervisor = self._make_supervisor(config, check_arguments)
        self._approver = Approver(self._state, runtime, self._errors)
        self._state.add_listener(self._approver)

        # from the state to scrapes, people and commands
        access = Access(config.server)
        self._figures = self._make_figures(access)
        self._view = AgentView(self._state, self._store, runtime, self._polling, self._figures)
        self._server = HttpServer(config.server, self._view.app, access)
        desk = AgentDesk(self._approver, self._store)
        self._control = ControlSocket(self._store.path.parent, desk)
        self._exporter: Exporter | None = None  # if OTLP is configured
        self._pings: Pings | None = None  # if a heartbeat is configured

    def _make_supervisor(self, config: Config, check_arguments: Sequence[str]) -> Supervisor:
        return Supervisor(
            make_orders(config),
            self._store,
            lock=self._store.disk.lock,
            clock=self._state,
            check_arguments=check_arguments,
        )

    def _make_figures(self, access: Access) -> ProcessFigures:
        return ProcessFigures(
            runtime=self._runtime,
            state=self._state,
            store=self._store,
            supervisor=self._supervisor,
            errors=self._errors,
            access=access,
        )

    def run(self) -> int:
        """Serve and poll; return the exit code."""
        previous_hook = threading.excepthook
        threading.excepthook = self._errors.thread_ended
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

    # ---- the start

    def _start(self) -> None:
        config = self._runtime.current.config
        self._restart_exporter(config.otlp)
        self._server.start()
        log.info(
            "notbefore %s: watching %s, serving %s",
            __version__,
            config.imds.endpoint,
            self._server.url,
        )
        self._stdout.start()
        self._start_polling(config)
        self._approver.start()
        self._control.start()
        self._restart_pings(config.heartbeat)
        self._use_sinks()
        self._systemd.ready()

    # ---- the main loop

    def _supervise(self) -> None:
        """Do the main thread's work until a signal, a new version, or too many failures end it."""
        while not self._errors.given_up:
            # a failure of one does not stop the others
            self._errors.attempt("main running", self._state.note_running)
            self._errors.attempt("main heartbeats", self._heartbeats.send_due)
            self._errors.attempt("main courier", self._supervisor.tick)
            self._errors.attempt("main systemd", self._notify_systemd)
            if self._supervisor.successor:
                return
            if self._errors.attempt("main wait", self._wait):
                return

    def _notify_systemd(self) -> None:
        is_alive = self._view.health().ok
        self._systemd.notify(self._view.status_line(), alive=is_alive)

    def _wait(self) -> bool:
        """Wait for work of the main thread; return whether a signal asks the agent to stop."""
        tracked = self._state.snapshot.state.tracked
        interval = IDLE_INTERVAL
        if self._freeze_meter.running or tracked.interrupting:
            interval = ALERT_INTERVAL
        patience = min(self._supervisor.patience, self._systemd.patience, interval)
        return self._main.wait(patience, *self._supervisor.watched)

    # ---- a reload

    def _reload(self) -> None:
        """Handle SIGHUP in the main thread: read the configuration, and use it or refuse it."""
        self._systemd.reloading()
        try:
            self._use(self._read_config())
        except ConfigError as error:
            self._figures.count_refused_reload()
            text = "the new configuration is refused, the old one stays in use: %s"
            log.error(text, error)  # noqa: TRY400 - a traceback would not help the user
        else:
            self._figures.count_reload()
            log.info("configuration reloaded")
        finally:
            self._systemd.ready()

    def _use(self, config: Config) -> None:
        """Use another configuration. Nothing has changed if this raises ``ConfigError``."""
        before = self._runtime.current.config
        orders = make_orders(config)
        check_endpoint(config.imds.endpoint)

        if (config.server, config.state) != (before.server, before.state):
            log.warning("changed settings of server and state take effect at the next start")
        set_up(config.log.format, config.log.level)

        # first, because a courier with the old orders does not know new sinks
        self._supervisor.reconfigure(orders)
        if (config.imds, config.vm) != (before.imds, before.vm):
            self._polling.stop()
            self._start_polling(config)
        else:
            self._runtime.replace(config=config)  # the polling may have found another endpoint
        self._use_sinks()
        self._approver.start()

        if config.otlp != before.otlp:
            self._restart_exporter(config.otlp)
        if config.heartbeat != before.heartbeat:
            self._restart_pings(config.heartbeat)

    # ---- the stop

    def _stop(self) -> None:
        # nothing new is read, asked or approved
        self._systemd.stopping()
        self._restart_pings(None)
        self._polling.stop()
        self._control.stop()
        self._approver.stop()
        self._freeze_meter.switch(on=False)

        # what is known is stored and sent
        self._state.write_stop()
        if self._state.snapshot.poll.answered is not None:
            self._supervisor.tick()  # the last changes are still to be delivered
        self._supervisor.stop(self._main.wait)
        self._restart_exporter(None)
        self._stdout.stop(FLUSH_PATIENCE)  # a line may wait as long for a sick disk

        self._server.stop()
        self._store.close()

    # ---- steps that the start and a reload share

    def _start_polling(self, config: Config) -> None:
        """Publish a configuration and poll by it. No other polling may run.

        The order keeps the approver from judging the events of one IMDS by a runtime for another:
        the known events count as outdated before the runtime is replaced.
        """
        imds = config.imds
        previous = self._runtime.current
        answered_version = ""
        if previous.endpoint == imds.endpoint:
            answered_version = previous.answered_version
        api_version = version_to_ask(imds, answered_version)
        self._tracker.use(imds.endpoint, api_version, imds.interval.seconds)
        self._runtime.replace(
            config=config,
            endpoint=imds.endpoint,
            answered_version=answered_version,
        )
        self._polling.start()

    def _use_sinks(self) -> None:
        """Route the deliveries that wait for removed sinks again, by the present routes."""
        terms = self._runtime.current.config.routing.sinks
        self._store.use_sinks(terms, self._targets_now)

    def _targets_now(self, delivery: Delivery) -> Targets:
        routing = self._runtime.current.config.routing
        return targets_of(delivery.record, routing, self._state.snapshot.vm)

    def _restart_exporter(self, otlp: Otlp | None) -> None:
        """Replace the exporter with the one that ``otlp`` configures; ``None``: do not export."""
        if self._exporter is not None:
            self._state.remove_listener(self._exporter)
            self._exporter.stop(FLUSH_PATIENCE)
            self._exporter = None
        if otlp is None:
            return
        if is_disabled(os.environ):
            log.info("OTEL_SDK_DISABLED is true: no metrics are exported over OTLP")
            return

        settings = resolved(otlp, "metrics", os.environ)
        counts = self._figures.exports
        self._exporter = Exporter(settings, self._view.export, counts, Redactor())
        self._state.add_listener(self._exporter)

    def _restart_pings(self, heartbeat: HeartbeatConfig | None) -> None:
        """Replace the pings with those that ``heartbeat`` configures; ``None``: send no pings."""
        if self._pings is not None:
            self._pings.stop()
            self._pings = None
        if heartbeat is None:
            return

        from notbefore.agent.pings import Pings  # noqa: PLC0415 - 6 MB, only for a ``ping_url``

        self._pings = Pings(heartbeat, self._view.ping_status, self._errors)
        self._pings.start()
