"""``Telemetry``: the agent's metrics over OTLP, in a thread of its own.

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
from typing import Any, Final

from msgspec import Struct

from notbefore.config.constraints import Headers
from notbefore.config.model import Otlp
from notbefore.core.record import Vm, identity
from notbefore.errors import ConfigError, SendError
from notbefore.metrics.families import Family
from notbefore.metrics.process import OTLP_RESULTS, ExportFigures

FIRST: Final = 2.0  # seconds to the first export: by then it is known who this VM is, if IMDS says so
SPACING: Final = 1.0  # seconds between two exports, however fast the changes come
RETRY: Final = 30.0  # seconds to the next attempt after a failure, if the interval is not shorter
LONGEST_RETRY_AFTER: Final = 300.0  # seconds: what a Retry-After may ask for at most
LAST_EXPORT: Final = 0.8  # seconds for the export at the end

log = logging.getLogger("notbefore.otlp")


class Reading(Struct, frozen=True):
    """What is known at a moment."""

    families: list[Family]
    vm: Vm | None
    version: str


class Sources(Struct, frozen=True):
    """What the exports are made of, and where they are counted."""

    read: Callable[[], Reading]  # called in the exporting thread
    figures: ExportFigures
    redactor: Any  # courier.redact.Redactor
    http: Callable[..., Any]  # makes a client: courier.http.Http


class Telemetry:
    """The exports of the configuration in use. Its methods are for the agent's main thread, but for ``wake``."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._config: Otlp | None = None
        self._exporter: _Exporter | None = None

    def use(self, config: Otlp | None, patience: float) -> None:
        """From now on export as ``config`` says; ``None``: not at all. Waits ``patience`` seconds to end."""
        if config == self._config:
            return
        if self._exporter is not None:
            self._exporter.stop(patience)
        self._exporter, self._config = None, config
        if config is not None and config.metrics:
            self._exporter = _Exporter(config, self._sources)

    def wake(self) -> None:
        """Something has changed: export soon. From any thread; never waits."""
        if (exporter := self._exporter) is not None:
            exporter.wake()


def learn(headers: Headers, redactor: Any) -> None:
    """Have the secrets taken out of texts that are in use now: a file may hold another one than before."""
    for secret in headers.values():
        with suppress(ConfigError):  # what cannot be read cannot be shown either
            redactor.add(secret.reveal())


class _Exporter:
    """One configuration in use, and the thread ``otlp``: when an export is due, and what came of it."""

    def __init__(self, config: Otlp, sources: Sources) -> None:
        self._config = config
        self._sources = sources
        self._due = time.monotonic() + FIRST
        self._sent = 0.0  # monotonic seconds of the last attempt
        self._sender: Any = None  # otlp.sender.Sender; made at the first attempt, and anew after a failure
        self._failed = False  # the last attempt
        self._warned = ""  # the reason of the last answer that rejected a part
        self._woken = threading.Event()
        self._stopping = False
        zeros = {("metrics", result): 0 for result in OTLP_RESULTS}
        sources.figures.otlp_exports = zeros | sources.figures.otlp_exports  # a new one: a scrape may read the old
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        self._woken.set()

    def stop(self, patience: float) -> None:
        """Export once more and end; a receiver that hangs is left behind."""
        self._stopping = True
        self._woken.set()
        self._thread.join(patience)

    # ---- the thread

    def _run(self) -> None:
        while not self._stopping:
            if self._woken.wait(max(0.0, self._due - time.monotonic())):
                self._woken.clear()
                if not self._failed:
                    self._due = min(self._due, max(time.monotonic(), self._sent + SPACING))
            elif not self._stopping:
                self._export(None)
        if not self._failed:
            self._export(LAST_EXPORT)
        self._close()

    def _export(self, timeout: float | None) -> None:
        self._sent = time.monotonic()
        try:
            from notbefore.otlp.sender import Sender  # noqa: PLC0415 - megabytes, only where it is configured
            from notbefore.otlp.signals import metrics_data  # noqa: PLC0415 - as above

            sources, reading = self._sources, self._sources.read()
            learn(self._config.headers, sources.redactor)
            resource = _resource(reading, self._config.resource)
            data = metrics_data(reading.families, resource, reading.version, datetime.now(UTC))
            self._sender = self._sender or Sender(self._config, "metrics", sources.http, sources.redactor)
            partial = self._sender.send(data, timeout)
            self._succeeded(partial.rejected, partial.reason)
        except SendError as error:
            self._fail(str(error), error.retry_after or 0.0)
        except ConfigError as error:  # a secret that cannot be read: somebody will mend it
            self._fail(str(error))
        except Exception as error:  # noqa: BLE001 - a library may raise anything; the next export is another
            self._fail(f"{type(error).__name__}: {error}")

    def _succeeded(self, rejected: int, reason: str) -> None:
        self._count("rejected" if rejected else "success")
        self._due = self._sent + self._config.interval.seconds
        if self._failed:
            log.info("OTLP metrics: exports are accepted again")
        if reason and not self._warned:
            log.warning("OTLP metrics: the receiver rejected %d items of an export: %s", rejected, reason)
        self._failed, self._warned = False, reason

    def _fail(self, reason: str, retry_after: float = 0.0) -> None:
        self._count("failure")
        self._close()  # the next one reads certificates anew, and looks the name up again
        usual = min(self._config.interval.seconds, RETRY)
        self._due = time.monotonic() + max(usual, min(retry_after, LONGEST_RETRY_AFTER))
        if not self._failed:
            log.warning("OTLP metrics: the export failed, and is tried again: %s", self._sources.redactor(reason))
        self._failed = True

    def _close(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def _count(self, result: str) -> None:
        self._sources.figures.otlp_exports["metrics", result] += 1


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
