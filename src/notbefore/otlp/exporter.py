"""``Exporter``: sends the agent's metrics over OTLP, in its own thread.

Nothing waits for it, and nothing is stored: each export contains the values of its moment, and
after a failure the next one has newer values. OpenTelemetry is imported in the thread, only if
``otlp`` is configured.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

from notbefore import __version__
from notbefore.config.model import Otlp
from notbefore.config.otel import prefers_deltas
from notbefore.core.record import Vm
from notbefore.core.text import shortened
from notbefore.errors import ConfigError, SendError
from notbefore.metrics.families import Family
from notbefore.net.redact import Redactor

FIRST: Final = 2.0  # seconds to the first export: by then IMDS has usually given this VM's identity
SPACING: Final = 1.0  # seconds between two exports, even if changes come faster
RETRY: Final = 30.0  # seconds to the next attempt after a failure, if the interval is not shorter
MAX_REASON: Final = 200  # characters of a receiver's text
SAID: Final = {
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
        self._woken, self._stopped = threading.Event(), threading.Event()
        self._sender: Any = None  # otlp.sender.Sender
        self._deltas: Any = None  # otlp.deltas.Deltas, if these are wanted
        self._began = time.time_ns()
        self._failed = False  # the last attempt
        self._said = False  # of the last attempt was a reason
        for result in SAID:
            counts.setdefault(("metrics", result), 0)
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Export soon, because something has changed. Called from any thread; never waits."""
        self._woken.set()

    def stop(self, patience: float) -> None:
        """Export once more and end.

        Do not wait longer than ``patience`` seconds for a receiver that hangs.
        """
        self._stopped.set()
        self._woken.set()
        self._thread.join(patience)

    # ---- the thread

    def _run(self) -> None:
        interval = self._config.interval.seconds
        self._stopped.wait(FIRST)
        while not self._stopped.is_set():
            self._woken.clear()
            self._export()
            if (
                not self._stopped.wait(min(RETRY, interval) if self._failed else SPACING)
                and not self._failed
            ):
                self._woken.wait(interval - SPACING)
        if not self._failed:
            self._export()
        if self._sender is not None:
            self._sender.close()

    def _export(self) -> None:
        try:
            partial = self._send()
        except (SendError, ConfigError) as error:
            # also for a secret that cannot be read: somebody may repair it
            self._ended("failure", str(error))
        except Exception as error:  # noqa: BLE001 - a library may raise anything; the next export may work
            self._ended("failure", f"{type(error).__name__}: {error}")
        else:
            self._ended("rejected" if partial.rejected else "success", partial.reason)

    def _send(self) -> Any:
        from notbefore.otlp.deltas import Deltas  # noqa: PLC0415 - megabytes, only if configured
        from notbefore.otlp.sender import Sender
        from notbefore.otlp.signals import agent_resource, metrics_data

        if self._sender is None:
            self._sender = Sender(self._config, "metrics")
        if self._deltas is None and prefers_deltas(os.environ):
            self._deltas = Deltas(self._began)

        families, vm = self._read()
        self._learn()
        resource = agent_resource(vm, __version__, self._config.resource)
        data = metrics_data(families, resource, __version__, datetime.now(UTC))
        if self._deltas is None:
            return self._sender.send(data)

        partial = self._sender.send(self._deltas.of(data))
        self._deltas.accepted()
        return partial

    def _learn(self) -> None:
        """Let the redactor know the present secrets: the secret in a file may have changed."""
        for secret in self._config.headers.values():
            with suppress(ConfigError):  # a secret that cannot be read cannot be shown either
                self._redactor.add(secret.reveal())
        for name, text in os.environ.items():
            if name.startswith("OTEL_EXPORTER_OTLP_") and name.endswith("HEADERS"):
                for pair in text.split(","):
                    self._redactor.add(pair.partition("=")[2].strip())

    def _ended(self, result: str, reason: str) -> None:
        """Count the result, and log what differs from the last attempt."""
        failed, said = result == "failure", bool(reason)
        self._counts["metrics", result] += 1
        if self._failed and not failed:
            log.info("OTLP metrics: exports are accepted again")
        if said and (failed, said) != (self._failed, self._said):
            # redact before cutting: a part of a secret would not be recognized
            text = shortened(self._redactor(reason), MAX_REASON)
            log.warning("OTLP metrics: %s: %s", SAID[result], text)
        self._failed, self._said = failed, said
