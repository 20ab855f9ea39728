"""``Telemetry``: the agent's metrics, and its own log if that is wanted, over OTLP; in a thread of its own.

Nothing waits for it, and it keeps nothing: each export holds what is known at its moment; one that fails is followed by
a later one. Of the agent's own log the last ``MAX_LINES`` wait. What OpenTelemetry needs is imported in the thread,
where ``otlp`` is configured.
"""

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final, Literal

from msgspec import Struct

from notbefore.config.sinks import Connection, Headers, Otlp
from notbefore.core.record import Vm, identity
from notbefore.delivery.redact import Redactor
from notbefore.errors import ConfigError, SendError
from notbefore.metrics.families import Family
from notbefore.metrics.process import OTLP_RESULTS, ExportFigures

Signal = Literal["metrics", "logs"]

FIRST: Final = 2.0  # seconds to the first export: by then it is known who this VM is, if IMDS says so
SPACING: Final = 1.0  # seconds between two exports, however fast the changes come
GATHER: Final = 5.0  # seconds in which lines of the log are gathered
RETRY: Final = 5.0  # seconds to the next attempt after the first failure; doubled with each
LONGEST_RETRY: Final = 60.0  # seconds between attempts to send the log; for metrics it is the interval
LONGEST_ASKED: Final = 300.0  # seconds: what a Retry-After may ask for at most
LAST_EXPORT: Final = 0.8  # seconds for the export at the end
MAX_LINES: Final = 128  # of the agent's own log; as many again may be under way
MAX_TEXT: Final = 1_000  # characters of one, and of its stack
LEVELS: Final = {logging.DEBUG: "debug", logging.INFO: "info", logging.WARNING: "warning", logging.ERROR: "error"}

log = logging.getLogger("notbefore.otlp")


class Moment(Struct, frozen=True):
    """What is told of a moment."""

    families: list[Family]
    vm: Vm | None
    version: str


class Telemetry:
    """The agent's hand on the exports. ``read`` is called in their thread, the rest by the agent's main thread."""

    def __init__(self, read: Callable[[], Moment], figures: ExportFigures) -> None:
        self._read = read
        self._figures = figures
        self._config: Otlp | None = None
        self._exporter: _Exporter | None = None

    def use(self, config: Otlp | None, patience: float) -> None:
        """From now on export as this says; ``None``: not at all. What is known last is told in so many seconds."""
        if config != self._config:
            if self._exporter is not None:
                self._exporter.stop(patience)
            self._exporter, self._config = None, config
            if config is not None and (config.metrics or config.agent_log != "none"):
                self._exporter = _Exporter(config, self._read, self._figures)
                self._exporter.start()
        if self._exporter is not None:
            self._exporter.listen()  # whoever sets up the log sends away all that listen

    def wake(self) -> None:
        """Something has changed. From any thread; never waits."""
        if (exporter := self._exporter) is not None:
            exporter.wake()


class _Exporter:
    """One configuration at work: the thread ``otlp``."""

    def __init__(self, config: Otlp, read: Callable[[], Moment], figures: ExportFigures) -> None:
        self._config = config
        self._read = read
        self._woken = threading.Event()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)
        redact = Redactor()
        self._logs_way = logs = config.logs or Connection.of(config)
        for headers in (config.headers, logs.headers):
            learn(headers, redact)
        self._roads: list[_Road] = []
        self._lines: Lines | None = None
        if config.metrics:
            self._roads.append(
                _Road("metrics", self._metrics, config.interval.seconds, _Far(Connection.of(config), figures, redact))
            )
        if config.agent_log != "none":
            self._lines = Lines(config.agent_log, self._thread, redact)
            pause = min(GATHER, config.interval.seconds)
            self._roads.append(_Road("logs", self._logs, pause, _Far(logs, figures, redact)))

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def listen(self) -> None:
        """Hear what is logged."""
        if self._lines is not None:
            logging.getLogger().addHandler(self._lines)

    def wake(self) -> None:
        """There is something new."""
        self._woken.set()

    def stop(self, patience: float) -> None:
        """Export once more and end; a far side that hangs is left behind."""
        if self._lines is not None:
            logging.getLogger().removeHandler(self._lines)
        self._over = True
        self._woken.set()
        self._thread.join(patience)

    # ---- the thread

    def _run(self) -> None:
        while not self._over:
            for road in self._roads:
                road.send_if_due()
            due = min(road.due for road in self._roads)
            if self._woken.wait(max(0.0, due - time.monotonic())):
                self._woken.clear()
                for road in self._roads:
                    road.hurry()
        for road in self._roads:
            road.finish()

    def _metrics(self) -> "_Made":
        from notbefore.otlp.metrics import metrics_request  # noqa: PLC0415 - megabytes, only where it is configured

        moment = self._read()
        resource = self._resource(moment, self._config.resource)
        return _Made(metrics_request(moment.families, resource, moment.version, datetime.now(UTC)))

    def _logs(self) -> "_Made | None":
        from notbefore.otlp.transport import log_record, logs_request  # noqa: PLC0415 - as above

        kept = self._lines
        if kept is None or not (lines := kept.waiting()):
            return None
        records = [log_record(line.time, line.severity, line.body, line.attributes) for line in lines]
        resource = self._resource(self._read(), self._logs_way.resource)
        return _Made(logs_request([(resource, records)]), kept.sent, kept.refused)

    def _resource(self, moment: Moment, own: dict[str, str]) -> dict[str, str]:
        vm = moment.vm
        known = identity(vm).items() if vm is not None else ()
        return {
            "service.name": "notbefore",
            # `instance` in Prometheus: without it the series of all VMs of a fleet would be one
            "service.instance.id": (vm.vm_id or vm.name if vm is not None else "") or socket.gethostname(),
            "service.version": moment.version,
            **{name: str(value) for name, value in known if value is not None},
            **own,
        }


class _Made(Struct, frozen=True):
    """A request, and what to call once it was taken, or would be refused whenever it were sent."""

    request: Any
    done: Callable[[], None] = lambda: None
    refused: Callable[[], None] = lambda: None


class _Far(Struct, frozen=True):
    """Where a signal goes; what is counted of it, and not told."""

    connection: Connection
    figures: ExportFigures
    redact: Redactor


def learn(headers: Headers, redact: Redactor) -> None:
    """Have the secrets kept that are in use now: a file may hold another one than before."""
    for secret in headers.values():
        with suppress(ConfigError):  # what cannot be read cannot be told either
            redact.add(secret.reveal())


class _Road:
    """One signal: when it is due, and what came of it. ``make`` gives what is to be sent now, if there is anything."""

    def __init__(self, signal: Signal, make: Callable[[], _Made | None], pause: float, far: _Far) -> None:
        self.due = time.monotonic() + FIRST
        self._signal: Signal = signal
        self._make = make
        self._pause = pause
        self._connection = far.connection
        self._figures = far.figures
        self._redact = far.redact
        self._sender: Any = None  # delivery.otlp.Sender; made at the first attempt
        self._sent = 0.0  # monotonic seconds of the last attempt
        self._failures = 0
        self._warned = ""  # what the far side said of the last export that it took
        zeros = {(signal, result): 0 for result in OTLP_RESULTS}
        self._figures.otlp_exports = zeros | self._figures.otlp_exports  # a new one: a scrape may be reading the old

    def send_if_due(self) -> None:
        """Send, if it is time."""
        if time.monotonic() >= self.due:
            self._send(None)

    def hurry(self) -> None:
        """Do not wait for the usual time, unless the far side is in trouble."""
        if self._signal == "metrics" and not self._failures:
            self.due = min(self.due, max(time.monotonic(), self._sent + SPACING))

    def finish(self) -> None:
        """The last one, if the far side took the one before."""
        if not self._failures:
            self._send(LAST_EXPORT)
        if self._sender is not None:
            self._sender.close()

    def _send(self, timeout: float | None) -> None:
        self._sent = time.monotonic()
        self.due = self._sent + self._pause
        made: _Made | None = None
        try:
            from notbefore.otlp.transport import Sender  # noqa: PLC0415 - as above

            learn(self._connection.headers, self._redact)
            made = self._make()
            if made is not None:
                self._sender = self._sender or Sender(self._connection, self._signal)
                partial = self._sender.send(made.request, timeout)
                self._worked(partial.rejected, partial.reason)
                made.done()
        except SendError as error:
            self._failed(error)
            if error.content and made is not None:
                made.refused()
        except ConfigError as error:  # a secret that cannot be read: somebody will mend it
            self._failed(SendError(str(error)))
        except Exception as error:  # noqa: BLE001 - a library may raise anything; the next export is another
            self._failed(SendError(f"{type(error).__name__}: {error}"))

    def _worked(self, rejected: int, reason: str) -> None:
        self._count("rejected" if rejected else "success")
        if self._failures:
            log.info("OTLP %s: the far side takes them again", self._signal)
        if reason and not self._warned:
            log.warning("OTLP %s: %d rejected, the far side says: %s", self._signal, rejected, self._redact(reason))
        self._failures, self._warned = 0, reason

    def _failed(self, error: SendError) -> None:
        self._count("failure")
        if self._sender is not None:  # the next one reads certificates anew, and looks the name up again
            self._sender.close()
            self._sender = None
        asked = min(error.retry_after or 0.0, LONGEST_ASKED)
        longest = self._pause if self._signal == "metrics" else LONGEST_RETRY
        wait = max(asked, min(longest, RETRY * 2.0 ** min(self._failures, 10)))
        self.due = time.monotonic() + wait
        if self._failures == 0:
            log.warning("OTLP %s: the export failed (%s): trying again", self._signal, self._redact(str(error)))
        self._failures += 1

    def _count(self, result: str) -> None:
        self._figures.otlp_exports[self._signal, result] += 1


class Line(Struct, frozen=True):
    """One line of the agent's own log."""

    time: datetime
    severity: str
    body: str
    attributes: dict[str, str]


class Lines(logging.Handler):
    """The last lines of the agent's own log, as far as they were not sent; what sending them logs is not among them."""

    def __init__(self, level: str, thread: threading.Thread, redact: Redactor) -> None:
        super().__init__(level.upper())
        self._sender = thread
        self._redact = redact
        self._lines: deque[Line] = deque(maxlen=MAX_LINES)
        self._under_way: list[Line] = []
        self._lost = 0
        self._mutex = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        """Take a line in, unless it comes from the sending itself."""
        if record.thread == self._sender.ident:
            return
        try:
            line = self._line(record)
        except Exception:  # noqa: BLE001 - arguments that do not fit their text: standard error has told it
            return
        with self._mutex:
            self._lost += len(self._lines) == MAX_LINES
            self._lines.append(line)

    def _line(self, record: logging.LogRecord) -> Line:
        attributes = {"log.logger": record.name}
        if record.exc_info and record.exc_info[0] is not None:
            stack = logging.Formatter().formatException(record.exc_info)
            attributes["exception.type"] = record.exc_info[0].__name__
            attributes["exception.stacktrace"] = self._redact(stack)[-MAX_TEXT:]
        level = max((number for number in LEVELS if number <= record.levelno), default=logging.DEBUG)
        time_of = datetime.fromtimestamp(record.created, UTC)
        return Line(time_of, LEVELS[level], self._redact(record.getMessage())[:MAX_TEXT], attributes)

    def waiting(self) -> list[Line]:
        """What is to be sent, the same again until it was sent; with a line that says how many were lost before."""
        with self._mutex:
            if not self._under_way and self._lines:
                self._under_way, lost, self._lost = list(self._lines), self._lost, 0
                self._lines.clear()
                if lost:
                    text = f"{lost} lines of the log before these were left out: nobody took them"
                    self._under_way.insert(0, Line(self._under_way[0].time, "warning", text, {"log.logger": log.name}))
            return self._under_way

    def sent(self) -> None:
        """What was waiting need not be kept any longer."""
        with self._mutex:
            self._under_way = []

    def refused(self) -> None:
        """What was waiting is lost: it would be refused again."""
        with self._mutex:
            self._lost += len(self._under_way)
            self._under_way = []
