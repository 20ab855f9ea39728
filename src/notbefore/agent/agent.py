"""``Agent``: the always-on process. Joins poller, watch, store and exposition; its main thread waits for signals.

Threads: main (signals, the beat written down, the state mended), poll, who (asks IMDS who this VM is, once an hour),
pulse (only while something is expected), tell (records to standard output), otlp (only where it is configured),
approve and control (only with ``--allow-approval``), and those of the HTTP server. None waits for another's network,
nor for whoever reads.
"""

import logging
import platform
import select
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from notbefore import __version__
from notbefore.agent.approver import Approver
from notbefore.agent.control_socket import ControlSocket
from notbefore.agent.courier import CourierManager, check
from notbefore.agent.polling import Polling
from notbefore.agent.start_request import ApprovalSettings
from notbefore.agent.stdout import StdoutWriter
from notbefore.agent.systemd import SystemdNotifier
from notbefore.agent.tracker import Tracker, now_utc
from notbefore.config.model import Config
from notbefore.config.sinks import Otlp
from notbefore.core.listing import PendingView
from notbefore.delivery.orders import Orders
from notbefore.errors import ConfigError
from notbefore.imds.client import TIMEOUT
from notbefore.logs import set_up
from notbefore.metrics.families import Family
from notbefore.metrics.process import Figures
from notbefore.store.outbox_reader import OutboxReader
from notbefore.store.state import Store
from notbefore.web.access import access
from notbefore.web.app import make_app
from notbefore.web.prometheus import MetricsText
from notbefore.web.server import HttpServer
from notbefore.web.view import AgentStatus, CheckResult

MEND_INTERVAL: Final = 10.0  # seconds between attempts to write a state that could not be written
READY_BEATS: Final = 3
STOP_PATIENCE: Final = 1.0  # seconds for a thread to end; what it has not committed then, it never will

log = logging.getLogger("notbefore.agent")


class Agent:
    """Runs until SIGTERM or SIGINT; SIGHUP reads the configuration again.

    Raises ``StoreError``, ``ListenError`` or ``ConfigError`` where it cannot start, and nothing after it.
    """

    def __init__(self, config: Config, reload: Callable[[], Config], *, allow_approval: bool = False) -> None:
        self._config = config
        self._allow_approval = allow_approval
        self._reload = reload
        self._figures = Figures(
            since=now_utc(), version=__version__, python=platform.python_version(), config_loaded=time.time()
        )
        self._store = Store(Path(config.state.dir))
        self._teller = StdoutWriter()
        self._watch = Tracker(self._store, self._figures, self._teller)
        self._outbox = OutboxReader(self._store.path)
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.settimeout(0)
        self._dispatcher = CourierManager(
            self._orders(config), self._figures, lambda: self._outbox.look()[1], self._poke
        )
        self._watch.routing = config.routing
        self._watch.outbox = lambda: self._outbox.look()[0]
        self._watch.wake = self._dispatcher.wake
        self._watcher = Polling(config, self._watch)
        self._approver = Approver(self._watch, self._switches(config))
        self._control = ControlSocket(self._store.path.parent, self._approver.carry_out) if allow_approval else None
        self._exposition = MetricsText(self._scraped)
        self._telemetry: Any = None  # telemetry.Telemetry, where OTLP is configured
        self._server = HttpServer(config.server.listen, make_app(self), access(config.server))
        self._notifier = SystemdNotifier()
        self._stopping = False
        self._next_heartbeat: dict[str, float] = {}  # sink -> monotonic seconds

    def run(self) -> int:
        """Serve and watch; returns the exit code."""
        previous = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
        previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        try:
            self._export(self._config.otlp)  # first: it hears what is logged from here on
            self._server.start()
            log.info("notbefore %s: watching %s, serving %s", __version__, self._config.imds.endpoint, self._server.url)
            self._teller.start()
            self._watcher.start()
            self._approver.start()
            if self._control is not None:
                self._control.start()
            self._notifier.ready()
            self._supervise()
        finally:
            self._stop()
            signal.set_wakeup_fd(previous_fd)
            for number, handler in previous.items():
                signal.signal(number, handler)
            self._reader.close()
            self._writer.close()
        return 0

    def _families(self) -> list[Family]:
        return self._watch.families(self._overdue)

    @property
    def _overdue(self) -> float:
        """Seconds since the next beat was due; an agent that stops has none that is."""
        return 0.0 if self._stopping else time.monotonic() - self._watcher.poller.due

    def _scraped(self) -> list[Family]:
        if self._config.exposition.compat == "none":
            return self._families()
        from notbefore.metrics.webdevops import webdevops  # noqa: PLC0415 - for those who ask for it

        return self._watch.families(self._overdue, webdevops)

    def _export(self, otlp: Otlp | None) -> None:
        """From now on export as this says; ``None``: not at all."""
        if self._telemetry is None and otlp is not None:
            from notbefore.otlp.exporter import Moment, Telemetry  # noqa: PLC0415 - only where it is configured

            self._telemetry = Telemetry(lambda: Moment(self._families(), self._watch.vm, __version__), self._figures)
            self._watch.moved.append(self._telemetry.wake)
        if self._telemetry is not None:
            self._telemetry.use(otlp, STOP_PATIENCE)

    def _supervise(self) -> None:
        """Until told to stop: keep the beat, see to the courier, mend the state, take signals."""
        mended, damaged = time.monotonic(), self._store.damaged_files
        while True:
            self._watch.keep()
            self._heartbeats()
            self._dispatcher.tick()  # the first one sends what was left by the boot before
            if self._store.degraded and time.monotonic() - mended >= MEND_INTERVAL:
                mended = time.monotonic()
                self._watch.mend()
            if self._store.damaged_files != damaged:
                damaged = self._store.damaged_files
                self._dispatcher.restart()
            self._notifier.beat(self._status(), alive=self.health().ok)
            if self._approver.endpoint != self._watcher.endpoint:  # IMDS was found elsewhere
                self._approver.configure(self._switches(self._config))
            if self._told_to_stop(self._patience()):
                return

    def _heartbeats(self) -> None:
        """Where a sink asks for signs of life: the first soon after the start, then one each interval."""
        now = time.monotonic()
        for name, sink in self._config.sinks.items():
            interval = sink.event_hub.heartbeat if sink.event_hub is not None else None
            if interval is None or self._watch.vm is None or now < self._next_heartbeat.get(name, 0.0):
                continue
            self._next_heartbeat[name] = now + interval.seconds
            self._watch.heartbeat(name, interval.seconds)

    def _told_to_stop(self, patience: float) -> bool:
        """Wait for signals, the courier's signs of life, or somebody's poke."""
        ready, _, _ = select.select([self._reader.fileno(), *self._dispatcher.descriptors], [], [], patience)
        if self._reader.fileno() not in ready:
            return False
        with suppress(BlockingIOError):
            for number in self._reader.recv(64):
                if number in (signal.SIGTERM, signal.SIGINT):
                    log.info("%s: stopping", signal.Signals(number).name)
                    return True
                if number == _SIGHUP and self._stopping:
                    log.info("SIGHUP: not reloaded, the agent is stopping")
                elif number == _SIGHUP:
                    self._notifier.reloading()
                    self._reconfigure()
                    self._notifier.ready()
        return False

    def _poke(self) -> None:
        """Have the main thread look around now. From any thread."""
        with suppress(OSError):
            self._writer.send(b"\0")  # no signal has the number 0

    def _orders(self, config: Config) -> Orders:
        return Orders(
            state_file=str(self._store.path.absolute()),
            sinks=config.sinks,
            links=config.links,
            hidden=config.hidden,
            log_format=config.log.format,
            log_level=config.log.level,
        )

    def _switches(self, config: Config) -> ApprovalSettings:
        return ApprovalSettings(config.approval, self._watcher.endpoint, config.imds.api_version, self._allow_approval)

    def _patience(self) -> float:
        # idle, nothing here needs attention but signals; a new event is noticed within this time, and Azure's notice
        # is longer: only a start without notice has its first beats written down a moment late
        idle = 1.0 if self._watch.expecting or self._store.degraded else 5.0
        return min(self._dispatcher.patience, self._notifier.patience, idle)

    def _status(self) -> str:
        """How it is, in a line for ``systemctl status``."""
        return "; ".join((f"{self._watch.listed_events} events listed", *self.ready().reasons))

    def _reconfigure(self) -> None:
        try:
            config = self._reload()
            watcher = Polling(config, self._watch, self._watcher)
            check(self._orders(config))
        except ConfigError as error:
            self._figures.config_reloads["failure"] += 1
            self._figures.config_refused = True
            log.error("the configuration is not taken over, the old one stays: %s", error)  # noqa: TRY400 - its text says all
            return
        if (config.server, config.state) != (self._config.server, self._config.state):
            log.warning("server and state are taken over at the next start")
        set_up(config.log.format, config.log.level)
        self._approver.configure(self._switches(config))  # first of all: what is taken back is not done any more
        self._export(config.otlp)
        if (config.imds, config.vm) != (self._config.imds, self._config.vm):
            self._watcher.stop()
            self._watcher = watcher
            self._watcher.start()
        self._dispatcher.reconfigure(self._orders(config))  # first: a courier with the old orders knows no new sinks
        self._watch.routing = config.routing
        self._approver.start()
        self._config = config
        self._figures.config_reloads["success"] += 1
        self._figures.config_refused = False
        self._figures.config_loaded = time.time()
        log.info("configuration reloaded")

    def _stop(self) -> None:
        self._stopping = True
        self._notifier.stopping()
        self._watcher.stop()
        if self._control is not None:
            self._control.stop()
        self._approver.stop()
        self._watch.stop()
        if self._watch.last_good is not None:  # it was at work: what was seen last is to be told
            self._dispatcher.tick()
        self._dispatcher.stop(self._told_to_stop)
        self._export(None)
        self._outbox.close()
        self._teller.stop(STOP_PATIENCE / 2)
        self._server.stop()
        self._store.close()

    # ---- View: what the HTTP server shows

    def metrics(self, accept: str) -> tuple[bytes, str]:
        """``/metrics``."""
        return self._exposition.render(accept)

    def health(self) -> CheckResult:
        """The beat is alive: the polling thread runs, and hangs in no request beyond its deadline."""
        watcher = self._watcher
        overdue = time.monotonic() - watcher.poller.due
        if not watcher.alive:
            return CheckResult(ok=False, reasons=("a thread that asks IMDS has ended",))
        if overdue > watcher.poller.timeout + TIMEOUT:
            return CheckResult(ok=False, reasons=(f"no beat for {overdue:.0f} s",))
        return CheckResult(ok=True)

    def ready(self) -> CheckResult:
        """Polled well within three beats. A state kept in memory alone is said, and no reason not to be ready."""
        said = [f"the state is kept in memory alone: {self._store.degraded}"] if self._store.degraded else []
        if self._watch.unreadable:
            said.append(f"{self._watch.unreadable} listed events cannot be read: the log says why")
        last = self._watch.last_good
        if last is None:
            return CheckResult(ok=False, reasons=("IMDS has not answered yet", *said))
        age, limit = time.monotonic() - last, READY_BEATS * self._watcher.poller.interval
        if age > limit:
            return CheckResult(
                ok=False, reasons=(f"the last good answer of IMDS is {age:.1f} s old, more than {limit:g} s", *said)
            )
        return CheckResult(ok=True, reasons=tuple(said))

    def pending(self) -> PendingView:
        """``/api/v1/events``."""
        return self._watch.pending()

    def history(self, since: datetime | None, limit: int) -> bytes:
        """``/api/v1/history``."""
        found = self._store.history(since.timestamp() if since else None, limit)
        return b'{"changes":[%b],"cut":%b}' % (b",".join(found.records), b"true" if found.cut else b"false")

    def agent_status(self) -> AgentStatus:
        """The state of the agent itself, for its page."""
        return AgentStatus(
            version=__version__,
            endpoint=self._watcher.endpoint,
            imds_error=self._watch.trouble,
            state_file=str(self._store.path),
            degraded=self._store.degraded,
            damaged_files=self._store.damaged_files,
            courier_running=self._figures.courier_running,
            sinks={name: sink.kind for name, sink in self._config.sinks.items()},
            outbox=self._outbox.look()[0],
        )


_SIGHUP: Final[int | None] = getattr(signal, "SIGHUP", None)  # not on Windows
_SIGNALS: Final = tuple(number for number in (signal.SIGTERM, signal.SIGINT, _SIGHUP) if number is not None)
