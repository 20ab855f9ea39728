"""What the benchmarks say of the machine and of a process on it."""

import os
import sys
from pathlib import Path


def describe() -> str:
    """What figures depend on: the machine, how busy it is, and the interpreter."""
    return f"machine: {os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}, Python {sys.version.split()[0]}"


def resident(pid: int | str = "self") -> float:
    """MiB that a process holds in memory; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS")), 0.0)
