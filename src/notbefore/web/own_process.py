"""The standard metrics of this process: CPU, memory, files. Their names and texts are those of Prometheus's clients."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from notbefore.metrics.families import Family, Metric

try:
    import resource
except ImportError:  # Windows, which has no /proc either  # pragma: no cover - the tests run on POSIX
    resource = None  # type: ignore[assignment]  # as above

VIRTUAL: Final = Metric("process_virtual_memory_bytes", "gauge", "Virtual memory size in bytes.")
RESIDENT: Final = Metric("process_resident_memory_bytes", "gauge", "Resident memory size in bytes.")
START: Final = Metric("process_start_time_seconds", "gauge", "Start time of the process since unix epoch in seconds.")
CPU: Final = Metric("process_cpu_seconds", "counter", "Total user and system CPU time spent in seconds.")
OPEN_FILES: Final = Metric("process_open_fds", "gauge", "Number of open file descriptors.")
STAT: Final = 4096  # bytes; the file has a few hundred
MAX_FILES: Final = Metric("process_max_fds", "gauge", "Maximum number of open file descriptors.")


class OwnProcess:
    """Reads ``/proc``; without it there are no families."""

    def __init__(self) -> None:
        self._booted = _booted()  # Unix seconds; None where there is no /proc
        self._ticks = os.sysconf("SC_CLK_TCK") if resource is not None else 0  # a second

    def families(self) -> Iterator[Family]:
        """The samples of this moment."""
        if self._booted is None or resource is None:
            return
        # proc(5): the name may contain spaces and parentheses; what follows it begins with the field `state`
        with open("/proc/self/stat", "rb", buffering=0) as file:  # noqa: PTH123 - a Path costs more than the reading
            fields = file.read(STAT).rpartition(b")")[2].split()
        ticks = self._ticks
        yield _once(VIRTUAL, float(fields[20]))
        yield _once(RESIDENT, float(fields[21]) * resource.getpagesize())
        yield _once(START, float(fields[19]) / ticks + self._booted)
        yield _once(CPU, float(fields[11]) / ticks + float(fields[12]) / ticks)
        yield _once(OPEN_FILES, float(len(os.listdir("/proc/self/fd"))))  # noqa: PTH208 - a Path for each file costs more
        yield _once(MAX_FILES, float(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))


def _once(metric: Metric, value: float) -> Family:
    return Family(metric, {(): value})


def _booted() -> float | None:
    try:
        lines = Path("/proc/stat").read_bytes().splitlines()
    except OSError:
        return None
    return next((float(line.split()[1]) for line in lines if line.startswith(b"btime ")), None)
