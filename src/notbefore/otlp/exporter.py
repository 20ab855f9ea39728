"""``Telemetry``: the agent's metrics, and its own log if that is wanted, over OTLP; in a thread of its own.

Nothing waits for it, and nothing is kept: each export holds what is known at its moment; one that fails is followed by
a later one. What OpenTelemetry needs is imported in the thread, where ``otlp`` is configured.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final, Literal, Protocol

from msgspec import Struct

from notbefore.config.forms import Headers
from notbefore.config.model import Otlp
from notbefore.config.sinks import OtlpConnection
from notbefore.core.record import Vm, identity
from notbefore.errors import ConfigError, SendError
from notbefore.metrics.families import Family
from notbefore.metrics.process import OTLP_RESULTS, ExportFigures
from notbefore.otlp.agent_log import LogLines

FIRST: Final = 2.0  # seconds to the first export: by then it is known who this VM is, if IMDS says so
SPACING: Final = 1.0  # seconds between two exports, however fast the changes come
GATHER: Final = 5.0  # seconds in which lines of the log are gathered
RETRY: Final = 5.0  # seconds to the next attempt after the first failure; doubled with each
LONGEST_RETRY: Final = 60.0  # seconds between attempts to send the log; for metrics it is the interval
LONGEST_RETRY_AFTER: Final = 300.0  # seconds: what a Retry-After may ask for at most
LAST_EXPORT: Final = 0.8  # seconds for the export at the end

log = logging.getLogger("notbefore.otlp")


class Redactor(Protocol):
    """Takes the secrets that were added out of a text."""

    def add(self, secret: str) -> None:
        """From now on, take this one out."""

    def __call__(self, text: str) -> str:
        """The text without secrets."""


class Reading(Struct, frozen=True):
    """What is known at a moment."""

    families: list[Family]
    vm: Vm | None
    version: str


class Sources(Struct, frozen=True):
    """What the exports are made of, and where they are counted."""

    read: Callable[[], Reading]  # called in the exporting thread
    figures: ExportFigures
    redactor: Redactor
    http: Callable[..., Any]  # makes a client: delivery.http.Http


class Telemetry:
    """The exports of the configuration in use. Its methods are for the agent's main thread, but for ``wake``."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._config: Otlp | None = None
        self._exporter: _Exporter | None = None

    def use(self, config: Otlp | None, patience: float) -> None:
        """From now on export as ``config`` says; ``None``: not at all. Waits ``patience`` seconds to end."""
        if config != self._config:
            if self._exporter is not None:
                self._exporter.stop(patience)
            self._exporter, self._config = None, config
            if config is not None and (config.metrics or config.agent_log != "none"):
                self._exporter = _Exporter(config, self._sources)
                self._exporter.start()
        if self._exporter is not None:
            self._exporter.listen()  # setting up the log replaces the root handlers, so add ours again

    def wake(self) -> None:
        """Something has changed: export soon. From any thread; never waits."""
        if (exporter := self._exporter) is not None:
            exporter.wake()


class _Exporter:
    """One configuration in use: the thread ``otlp``."""

    def __init__(self, config: Otlp, sources: Sources) -> None:
        self._config = config
        self._sources = sources
        self._woken = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)
        self._to_logs = config.logs or config
        for headers in (config.headers, self._to_logs.headers):
            learn(headers, sources.redactor)
        self._signals: list[_SignalExport] = []
        self._lines: LogLines | None = None
        if config.metrics:
            target = ExportTarget("metrics", config, config.interval.seconds)
            self._signals.append(_SignalExport(target, self._metrics, sources))
        if config.agent_log != "none":
            self._lines = LogLines(config.agent_log, self._thread, sources.redactor)
            target = ExportTarget("logs", self._to_logs, min(GATHER, config.interval.seconds))
            self._signals.append(_SignalExport(target, self._logs, sources))

    def start(self) -> None:
        self._thread.start()

    def listen(self) -> None:
        """Keep what is logged."""
        if self._lines is not None:
            logging.getLogger().addHandler(self._lines)

    def wake(self) -> None:
        self._woken.set()

    def stop(self, patience: float) -> None:
        """Export once more and end; a receiver that hangs is left behind."""
        if self._lines is not None:
            logging.getLogger().removeHandler(self._lines)
        self._stopping = True
        self._woken.set()
        self._thread.join(patience)

    # ---- the thread

    def _run(self) -> None:
        while not self._stopping:
            for signal in self._signals:
                signal.send_if_due()
            due = min(signal.due for signal in self._signals)
            if self._woken.wait(max(0.0, due - time.monotonic())):
                self._woken.clear()
                for signal in self._signals:
                    signal.hurry()
        for signal in self._signals:
            signal.finish()

    def _metrics(self) -> "ExportRequest":
        from notbefore.otlp.signals import metrics_data  # noqa: PLC0415 - megabytes, only where it is configured

        reading = self._sources.read()
        resource = _resource(reading, self._config.resource)
        return ExportRequest(metrics_data(reading.families, resource, reading.version, datetime.now(UTC)))

    def _logs(self) -> "ExportRequest | None":
        from notbefore.otlp.signals import log_record, resource_of  # noqa: PLC0415 - as above

        kept = self._lines
        if kept is None or not (lines := kept.batch()):
            return None
        resource = resource_of(_resource(self._sources.read(), self._to_logs.resource))
        return ExportRequest([log_record(line, resource) for line in lines], kept.accepted, kept.refused)


def _resource(reading: Reading, own: dict[str, str]) -> dict[str, str]:
    vm = reading.vm
    known = identity(vm).items() if vm is not None else ()
    return {
        "service.name": "notbefore",
        # `instance` in Prometheus: without it the series of all VMs of a fleet would be one
        "service.instance.id": (vm.vm_id or vm.name if vm is not None else "") or socket.gethostname(),
        "service.version": reading.version,
        **{name: str(value) for name, value in known if value is not None},
        **own,
    }


class ExportRequest(Struct, frozen=True):
    """What to send, and what to call once it is accepted, or refused for what it holds."""

    data: Any  # as Sender.send takes it
    accepted: Callable[[], None] = lambda: None
    refused: Callable[[], None] = lambda: None


class ExportTarget(Struct, frozen=True):
    """Where a signal goes, and how often: an export each ``interval`` seconds."""

    signal: Literal["metrics", "logs"]
    connection: OtlpConnection
    interval: float


def learn(headers: Headers, redactor: Redactor) -> None:
    """Have the secrets taken out of texts that are in use now: a file may hold another one than before."""
    for secret in headers.values():
        with suppress(ConfigError):  # what cannot be read cannot be shown either
            redactor.add(secret.reveal())


class _SignalExport:
    """One signal: when it is due, and what came of it. ``make`` gives what is to be sent now, if there is anything."""

    def __init__(self, target: ExportTarget, make: Callable[[], ExportRequest | None], sources: Sources) -> None:
        self.due = time.monotonic() + FIRST
        self._target = target
        self._make = make
        self._sources = sources
        self._sender: Any = None  # otlp.sender.Sender; made at the first attempt
        self._sent = 0.0  # monotonic seconds of the last attempt
        self._failures = 0
        self._warned = ""  # the reason of the last answer that rejected a part
        figures, zeros = sources.figures, {(target.signal, result): 0 for result in OTLP_RESULTS}
        figures.otlp_exports = zeros | figures.otlp_exports  # a new one: a scrape may be reading the old

    def send_if_due(self) -> None:
        """Send, if it is time."""
        if time.monotonic() >= self.due:
            self._send(None)

    def hurry(self) -> None:
        """Do not wait for the interval to end, unless the last export failed."""
        if self._target.signal == "metrics" and not self._failures:
            self.due = min(self.due, max(time.monotonic(), self._sent + SPACING))

    def finish(self) -> None:
        """Send the last one, unless the one before failed."""
        if not self._failures:
            self._send(LAST_EXPORT)
        if self._sender is not None:
            self._sender.close()

    def _send(self, timeout: float | None) -> None:
        self._sent = time.monotonic()
        self.due = self._sent + self._target.interval
        request: ExportRequest | None = None
        try:
            from notbefore.otlp.sender import Sender  # noqa: PLC0415 - as above

            learn(self._target.connection.headers, self._sources.redactor)
            request = self._make()
            if request is not None:
                target, sources = self._target, self._sources
                self._sender = self._sender or Sender(target.connection, target.signal, sources.http, sources.redactor)
                partial = self._sender.send(request.data, timeout)
                self._succeeded(partial.rejected, partial.reason)
                request.accepted()
        except SendError as error:
            self._failed(error)
            if error.content and request is not None:
                request.refused()
        except ConfigError as error:  # a secret that cannot be read: somebody will mend it
            self._failed(SendError(str(error)))
        except Exception as error:  # noqa: BLE001 - a library may raise anything; the next export is another
            self._failed(SendError(f"{type(error).__name__}: {error}"))

    def _succeeded(self, rejected: int, reason: str) -> None:
        signal = self._target.signal
        self._count("rejected" if rejected else "success")
        if self._failures:
            log.info("OTLP %s: exports are accepted again", signal)
        if reason and not self._warned:
            log.warning("OTLP %s: the receiver rejected %d items of an export: %s", signal, rejected, reason)
        self._failures, self._warned = 0, reason

    def _failed(self, error: SendError) -> None:
        self._count("failure")
        if self._sender is not None:  # the next one reads certificates anew, and looks the name up again
            self._sender.close()
            self._sender = None
        asked = min(error.retry_after or 0.0, LONGEST_RETRY_AFTER)
        longest = self._target.interval if self._target.signal == "metrics" else LONGEST_RETRY
        wait = max(asked, min(longest, RETRY * 2.0 ** min(self._failures, 10)))
        self.due = time.monotonic() + wait
        if self._failures == 0:
            text = self._sources.redactor(str(error))
            log.warning("OTLP %s: the export failed, and is tried again: %s", self._target.signal, text)
        self._failures += 1

    def _count(self, result: str) -> None:
        self._sources.figures.otlp_exports[self._target.signal, result] += 1
