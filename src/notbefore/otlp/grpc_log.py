"""``last_line``: why OpenTelemetry's gRPC exporter failed. It says so only in its log."""

import logging
import threading
from typing import Final

from notbefore.otlp import NO_REASON


class LastLine(logging.Filter):
    """Keeps the last line of each thread, and does not let it through: the caller logs it."""

    def __init__(self) -> None:
        super().__init__()
        self._lines = threading.local()

    @property
    def text(self) -> str:
        """The last line of this thread since ``forget``."""
        return getattr(self._lines, "text", NO_REASON)

    def forget(self) -> None:
        """Forget the line of this thread."""
        self._lines.text = NO_REASON

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep a line."""
        self._lines.text = record.getMessage()
        return False


last_line: Final = LastLine()


def keep_last_line() -> None:
    """Let ``last_line`` see every line of the exporter. Call it before importing the exporter.

    The exporter's own filter drops a repeated line, so this one must be the first.
    """
    logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter").addFilter(last_line)
