"""``Exporter`` sends the agent's metrics over OTLP, in its own thread.

No other thread waits for it, and nothing is stored: each export has the values of its moment, and
after a failure the next one has newer values. OpenTelemetry is imported in the thread, only if
``otlp`` is configured.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from notbefore.config.model import Otlp
from notbefore.core.record import Vm
from notbefore.core.text import shortened
from notbefore.errors import ConfigError, SendError
from notbefore.metrics.families import Family
from notbefore.net.redact import Redactor

if TYPE_CHECKING:
    from notbefore.otlp.metrics_export import MetricsExport
    from notbefore.otlp.partial_success import PartialSuccess

FIRST: Final = 2.0  # seconds to the first export: by then IMDS has usually given this VM's identity
SPACING: Final = 1.0  # seconds between two exports, even if changes come faster
RETRY: Final = 30.0  # seconds to the next attempt after a failure, if the interval is not shorter
MAX_WARNING: Final = 200  # characters of a receiver's text
WARNINGS: Final = {  # by the result of an export that has a reason
    "failure": "the export failed, and is tried again",
    "rejected": "the receiver rejected a part of an export",
    "success": "the receiver warns",
}

log = logging.getLogger("notbefore.otlp")


class Exporter:
    """The exports of one configuration, in the thread ``otlp``.

    ``read`` returns the present values and is called in that thread. The results are counted in
    ``counts``, by signal and result. ``redactor`` removes secrets from the log.
    """

    def __init__(
        self,
        config: Otlp,
        read: Callable[[], tuple[list[Family], Vm | None]],
        counts: dict[tuple[str, str], int],
        redactor: Redactor,
    ) -> None:
        self._config = config
        self._read = read
        self._counts = counts
        self._redactor = redactor
        self._woken = threading.Event()
        self._stopped = threading.Event()
        self._export: MetricsExport | None = None
        self._began = time.time_ns()
        self._failed = False  # the last export failed
        self._warned = False  # the last export had a reason to warn
        for result in WARNINGS:
            counts.setdefault(("metrics", result), 0)
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Export soon, because something has changed. Called from any thread; never waits."""
        self._woken.set()

    def stop(self, patience: float) -> None:
        """Export a last time and end. Wait ``patience`` seconds at most: a receiver may hang."""
        self._stopped.set()
        self._woken.set()
        self._thread.join(patience)

    # ---- the thread

    def _run(self) -> None:
        self._stopped.wait(FIRST)
        while not self._stopped.is_set():
            self._woken.clear()
            self._try_export()
            self._wait()
        if not self._failed:
            self._try_export()
        if self._export is not None:
            self._export.close()

    def _wait(self) -> None:
        """Wait until the next export is due, or ``stop`` is called."""
        interval = self._config.interval.seconds
        if self._failed:
            self._stopped.wait(min(RETRY, interval))
        elif not self._stopped.wait(SPACING):
            self._woken.wait(interval - SPACING)

    def _try_export(self) -> None:
        try:
            partial = self._send()
        except (SendError, ConfigError) as error:
            # also for a secret that cannot be read: it may be corrected
            self._note("failure", str(error))
        except Exception as error:  # noqa: BLE001 - a library may raise anything; try again later
            self._note("failure", f"{type(error).__name__}: {error}")
        else:
            result = "success"
            if partial.rejected:
                result = "rejected"
            self._note(result, partial.reason)

    def _send(self) -> "PartialSuccess":
        if self._export is None:
            from notbefore.otlp.metrics_export import MetricsExport

            self._export = MetricsExport(self._config, self._began)
        families, vm = self._read()
        self._learn_secrets()
        return self._export.send(families, vm)

    def _learn_secrets(self) -> None:
        """Let the redactor know the present secrets: the secret in a file may have changed."""
        for secret in self._config.headers.values():
            with suppress(ConfigError):  # a secret that cannot be read cannot be shown either
                self._redactor.add(secret.reveal())
        for name, text in os.environ.items():
            if name.startswith("OTEL_EXPORTER_OTLP_") and name.endswith("HEADERS"):
                for pair in text.split(","):
                    self._redactor.add(pair.partition("=")[2].strip())

    def _note(self, result: str, reason: str) -> None:
        """Count the result, and log what differs from the last export."""
        failed = result == "failure"
        warns = reason != ""
        is_repetition = self._warned and failed == self._failed
        self._counts["metrics", result] += 1
        if self._failed and not failed:
            log.info("OTLP metrics: exports are accepted again")
        if warns and not is_repetition:
            # redact before cutting: a part of a secret would not be recognized
            text = shortened(self._redactor(reason), MAX_WARNING)
            log.warning("OTLP metrics: %s: %s", WARNINGS[result], text)
        self._failed = failed
        self._warned = warns
