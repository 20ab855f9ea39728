"""Programs and rights that tests need in addition to Python packages.

A test is skipped on a machine that lacks one of them, and the reason says how to get it.
"""

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import pytest

NOBODY = 65534  # the id of the user ``nobody``


def _may_mount() -> bool:
    """Return whether this process may mount disks in a namespace."""
    command = ["unshare", "--mount", "true"]
    try:
        completed = subprocess.run(command, capture_output=True, check=False)
    except OSError:
        return False
    return completed.returncode == 0


def _is_root() -> bool:
    return os.geteuid() == 0


def compiler() -> list[str] | None:
    """Return the command of a C compiler: the machine's, or the Python package ``ziglang``."""
    path = shutil.which("cc")
    if path is not None:
        return [path]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    return None


COMMANDS = {  # command -> how to install it
    "amtool": "apt-get install prometheus-alertmanager",
    "awk": "apt-get install mawk",
    "azurite-blob": "npm install --global --ignore-scripts azurite@3.35.0",
    "chromium": "apt-get install chromium",
    "bash": "apt-get install bash",
    "curl": "apt-get install curl",
    "fish": "apt-get install fish",
    "find": "apt-get install findutils",
    "grep": "apt-get install grep",
    "gzip": "apt-get install gzip",
    "ip": "apt-get install iproute2",
    "prometheus": "apt-get install prometheus",
    "prometheus-alertmanager": "apt-get install prometheus-alertmanager",
    "promtool": "apt-get install prometheus",
    "sed": "apt-get install sed",
    "systemd-analyze": "apt-get install systemd",
    "tar": "apt-get install tar",
    "unshare": "apt-get install util-linux",
    "zsh": "apt-get install zsh",
}
# need -> how to get it, and a function that returns something true if it is here
NEEDS: dict[str, tuple[str, Callable[[], object]]] = {
    **{name: (install, partial(shutil.which, name)) for name, install in COMMANDS.items()},
    "IPv6": ("enable it on the loopback interface", socket.has_dualstack_ipv6),
    "a C compiler": ("apt-get install gcc libc6-dev", compiler),
    "proton": (
        "apt-get install gcc python3-dev, and make clean",
        partial(importlib.util.find_spec, "proton"),
    ),
    "root": ("run the tests as root", _is_root),
    "the right to mount": ("run the tests as root, with unshare", _may_mount),
}


@cache
def is_here(name: str) -> bool:
    """Return whether this machine has an item of ``NEEDS``."""
    _, is_available = NEEDS[name]
    return bool(is_available())


def needs(*names: str) -> None:
    """Skip the test unless this machine has all of these items of ``NEEDS``."""
    missing = [name for name in names if not is_here(name)]
    if missing:
        ways = dict.fromkeys(NEEDS[name][0] for name in missing)  # each way once
        pytest.skip(f"needs {', '.join(missing)} ({'; '.join(ways)})")


def skip_summary(reasons: Iterable[str]) -> str:
    """Return in one line how many tests were skipped, in all and for each reason."""
    counts = Counter(reason.removeprefix("Skipped: ") for reason in reasons)
    parts = [f"{count} {reason}" for reason, count in counts.most_common()]
    return f"{counts.total()} skipped: {', '.join(parts)}"


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Let this process have no rights of root."""
    was_root = _is_root()
    if was_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if was_root:
            os.seteuid(0)


def compile_library(source: Path, library: Path) -> None:
    """Compile a file in C into a shared library."""
    needs("a C compiler")
    command = compiler()
    assert command
    subprocess.run(
        [*command, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True
    )
