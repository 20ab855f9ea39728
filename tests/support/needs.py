"""What the tests need of the machine beside Python's packages: where it is missing they are skipped, and say so."""

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest


class Need(NamedTuple):
    """How to get it, what is not seen without it, and how to find out; else it is a command on the PATH."""

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


NEEDS = {
    "IPv6": Need("enable it on the loopback interface", "listening over IPv6", socket.has_dualstack_ipv6),
    "a C compiler": Need(
        "apt-get install gcc libc6-dev", "clocks that jump and disks that hang", lambda: compiler() is not None
    ),
    "amtool": Need("apt-get install prometheus-alertmanager", "that Alertmanager accepts config/prometheus"),
    "awk": Need("apt-get install mawk", "config/fleet/install.sh"),
    "azurite-blob": Need(
        "npm install --global --ignore-scripts azurite@3.35.0", "instances of the fleet that share a container"
    ),
    "chromium": Need("apt-get install chromium", "the pages in a browser"),
    "curl": Need("apt-get install curl", "what curl, as in the documents, is answered"),
    "dnsmasq": Need("apt-get install dnsmasq-base", "a DHCP server that says where IMDS is"),
    "ip": Need("apt-get install iproute2", "a network without a way out, and one with a DHCP server"),
    "prometheus": Need("apt-get install prometheus", "what Prometheus makes of the metrics, rules and dashboards"),
    "prometheus-alertmanager": Need("apt-get install prometheus-alertmanager", "what Alertmanager makes of the alerts"),
    "promtool": Need("apt-get install prometheus", "that Prometheus accepts the metrics, and each alert"),
    "proton": Need(
        "apt-get install gcc python3-dev, then make clean",
        "all that goes through an Event Hub, the fleet among it",
        lambda: importlib.util.find_spec("proton") is not None,
    ),
    "root": Need("run the tests as root", "other users, other owners, and namespaces", lambda: os.geteuid() == 0),
    "sed": Need("apt-get install sed", "config/fleet/install.sh"),
    "setpriv": Need("apt-get install util-linux", "an agent without a capability"),
    "systemd-analyze": Need("apt-get install systemd", "that systemd accepts the units"),
    "the right to mount": Need("run the tests as root, with unshare", "full and read-only disks", _may_mount),
    "unshare": Need("apt-get install util-linux", "an installation without a network"),
}


@cache
def is_here(name: str) -> bool:
    """Whether this machine has what ``NEEDS`` calls so."""
    look = NEEDS[name].is_here
    return shutil.which(name) is not None if look is None else look()


def needs(*names: str) -> None:
    """Skip the test unless this machine has all of these, which ``NEEDS`` knows."""
    missing = [name for name in names if not is_here(name)]
    if missing:
        ways = "; ".join(dict.fromkeys(NEEDS[name].get for name in missing))
        unseen = "; ".join(dict.fromkeys(NEEDS[name].unseen for name in missing))
        pytest.skip(f"needs {', '.join(missing)} ({ways}). Not seen without it: {unseen}")


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
