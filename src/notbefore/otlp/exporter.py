"""``Telemetry``: the agent's metrics over OTLP, in a thread of its own.

Nothing waits for it, and nothing is kept: each export holds what is known at its moment; one that fails is followed by
a later one. What OpenTelemetry needs is imported in the thread, where ``otlp`` is configured.
"""

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

from msgspec import Struct

from notbefore.config.constraints import Headers
from notbefore.config.model import Otlp
from notbefore.core.record import Vm
from notbefore.core.text import shortened
from notbefore.errors import ConfigError, SendError
from notbefore.metrics.families import Family
from notbefore.metrics.process import OTLP_RESULTS, ExportFigures

FIRST: Final = 2.0  # seconds to the first export: by then it is known who this VM is, if IMDS says so
SPACING: Final = 1.0  # seconds between two exports, however fast the changes come
RETRY: Final = 30.0  # seconds to the next attempt after a failure, if the interval is not shorter
MAX_REASON: Final = 200  # characters of what a receiver said

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
        self._config, self._exporter = config, _Exporter(config, self._sources) if config is not None else None

    def wake(self) -> None:
        """Something has changed: export soon. From any thread; never waits."""
        if (exporter := self._exporter) is not None:
            exporter.woken.set()


def learn(headers: Headers, redactor: Any) -> None:
    """Have the secrets taken out of texts that are in use now: a file may hold another one than before."""
    for secret in headers.values():
        with suppress(ConfigError):  # what cannot be read cannot be shown either
            redactor.add(secret.reveal())
    for name, text in os.environ.items():
        if name.startswith("OTEL_EXPORTER_OTLP_") and name.endswith("HEADERS"):
            for pair in text.split(","):
                redactor.add(pair.partition("=")[2].strip())


class _Exporter:
    """One configuration in use, and the thread ``otlp``: when an export is due, and what came of it."""

    def __init__(self, config: Otlp, sources: Sources) -> None:
        self.woken = threading.Event()
        self._stopped = threading.Event()
        self._config = config
        self._sources = sources
        self._sender: Any = None  # otlp.sender.Sender
        self._failed = False  # the last attempt
        self._warned = False  # that the receiver rejected a part
        zeros = {("metrics", result): 0 for result in OTLP_RESULTS}
        sources.figures.otlp_exports = zeros | sources.figures.otlp_exports  # a new one: a scrape may read the old
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)
        self._thread.start()

    def stop(self, patience: float) -> None:
        """Export once more and end; a receiver that hangs is left behind."""
        self._stopped.set()
        self.woken.set()
        self._thread.join(patience)

    # ---- the thread

    def _run(self) -> None:
        interval = self._config.interval.seconds
        self._stopped.wait(FIRST)
        while not self._stopped.is_set():
            self.woken.clear()
            self._export()
            if not self._stopped.wait(min(RETRY, interval) if self._failed else SPACING) and not self._failed:
                self.woken.wait(interval - SPACING)
        if not self._failed:
            self._export()
        if self._sender is not None:
            self._sender.close()

    def _export(self) -> None:
        try:
            from notbefore.otlp.sender import Sender  # noqa: PLC0415 - megabytes, only where it is configured
            from notbefore.otlp.signals import agent_resource, metrics_data  # noqa: PLC0415 - as above

            sources, reading = self._sources, self._sources.read()
            learn(self._config.headers, sources.redactor)
            resource = agent_resource(reading.vm, reading.version, self._config.resource)
            data = metrics_data(reading.families, resource, reading.version, datetime.now(UTC))
            self._sender = self._sender or Sender(self._config, "metrics", sources.http)
            partial = self._sender.send(data)
        except (SendError, ConfigError) as error:  # a secret that cannot be read is one of them: somebody will mend it
            self._fail(str(error))
        except Exception as error:  # noqa: BLE001 - a library may raise anything; the next export is another
            self._fail(f"{type(error).__name__}: {error}")
        else:
            self._succeed(partial.rejected, partial.reason)

    def _succeed(self, rejected: int, reason: str) -> None:
        self._count("rejected" if rejected else "success")
        if self._failed:
            log.info("OTLP metrics: exports are accepted again")
        if reason and not self._warned:
            log.warning("OTLP metrics: the receiver rejected %d items of an export: %s", rejected, self._shown(reason))
        self._failed, self._warned = False, bool(reason)

    def _fail(self, reason: str) -> None:
        self._count("failure")
        if not self._failed:
            log.warning("OTLP metrics: the export failed, and is tried again: %s", self._shown(reason))
        self._failed = True

    def _shown(self, reason: str) -> str:
        # redacted before it is cut: a part of a secret would not be known
        return shortened(self._sources.redactor(reason), MAX_REASON)

    def _count(self, result: str) -> None:
        self._sources.figures.otlp_exports["metrics", result] += 1
