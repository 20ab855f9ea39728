"""What the tests need of the machine beside Python's packages: where it is missing they are skipped, and say so."""

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest


class Need(NamedTuple):
    """How to get it, what is not seen without it, and how to find out whether it is here.

    Without the last one it is a command on the PATH.
    """

    get: str
    unseen: str
    is_here: Callable[[], bool] | None = None


def _may_mount() -> bool:
    """A namespace of its own in which a disk can be mounted."""
    try:
        return subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def compiler() -> list[str] | None:
    """The command of a C compiler: this machine's, or the one that came as a Python package."""
    if found := shutil.which("cc"):
        return [found]
    return [sys.executable, "-m", "ziglang", "cc"] if importlib.util.find_spec("ziglang") else None


APT = "apt-get install "
NEEDS = {
    "IPv6": Need("enable it on the loopback interface", "listening over IPv6", socket.has_dualstack_ipv6),
    "a C compiler": Need(APT + "gcc libc6-dev", "clocks that jump, disks that hang", lambda: compiler() is not None),
    "amtool": Need(APT + "prometheus-alertmanager", "that Alertmanager accepts config/alertmanager"),
    "awk": Need(APT + "mawk", "config/fleet/install.sh"),
    "azurite-blob": Need("npm install --global --ignore-scripts azurite@3.35.0", "checkpoints in Blob Storage"),
    "chromium": Need(APT + "chromium", "the pages in a browser"),
    "curl": Need(APT + "curl", "what the documents do with curl"),
    "find": Need(APT + "findutils", "the bundle"),
    "grep": Need(APT + "grep", "the commands of docs/switching.md"),
    "gzip": Need(APT + "gzip", "the bundle"),
    "ip": Need(APT + "iproute2", "a network of its own"),
    "prometheus": Need(APT + "prometheus", "what Prometheus makes of metrics, rules and dashboards"),
    "prometheus-alertmanager": Need(APT + "prometheus-alertmanager", "what Alertmanager makes of the alerts"),
    "promtool": Need(APT + "prometheus", "that Prometheus accepts metrics and rules, and when each alert fires"),
    "proton": Need(
        APT + "gcc python3-dev, and make clean",
        "all that goes through an Event Hub, the fleet as well",
        lambda: importlib.util.find_spec("proton") is not None,
    ),
    "root": Need("run the tests as root", "other users, and networks of their own", lambda: os.geteuid() == 0),
    "sed": Need(APT + "sed", "config/fleet/install.sh"),
    "systemd-analyze": Need(APT + "systemd", "that systemd accepts the units"),
    "tar": Need(APT + "tar", "the bundle"),
    "the right to mount": Need("run the tests as root, with unshare", "full and read-only disks", _may_mount),
    "unshare": Need(APT + "util-linux", "a network of its own"),
}


@cache
def is_here(name: str) -> bool:
    """Whether this machine has what ``NEEDS`` calls so."""
    look = NEEDS[name].is_here
    return shutil.which(name) is not None if look is None else look()


def needs(*names: str) -> None:
    """Skip the test unless this machine has all of these, which ``NEEDS`` knows."""
    if missing := [name for name in names if not is_here(name)]:
        unseen = "; ".join(dict.fromkeys(NEEDS[name].unseen for name in missing))
        pytest.skip(f"needs {', '.join(missing)} ({how_to_get(missing)}). Not seen without it: {unseen}")


def how_to_get(names: Sequence[str]) -> str:
    """One command for all that Debian has, and what else is to be done."""
    ways = dict.fromkeys(NEEDS[name].get for name in names)
    packages = " ".join(way.removeprefix(APT) for way in ways if way.startswith(APT))
    return "; ".join([APT + packages] * bool(packages) + [way for way in ways if not way.startswith(APT)])


def not_seen(reasons: Iterable[str]) -> str:
    """What a run did not see, in one line: how many tests for want of what."""
    counted = Counter(reason.removeprefix("Skipped: ").partition(". Not seen")[0] for reason in reasons)
    parts = [
        reason.replace("needs", f"{count} need{'s' if count == 1 else ''}", 1)
        if reason.startswith("needs ")
        else f"{count}: {reason}"
        for reason, count in counted.most_common()
    ]
    return f"{counted.total()} skipped: {', '.join(parts)}"


def compile_library(source: Path, library: Path) -> None:
    """A shared library of one file in C."""
    needs("a C compiler")
    command = compiler()
    assert command
    subprocess.run([*command, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
