"""What the tests need of the machine beside Python's packages: where it is missing they are
skipped, and say so.
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


def _may_mount() -> bool:
    """A namespace of its own in which a disk can be mounted."""
    try:
        return (
            subprocess.run(
                ["unshare", "--mount", "true"], capture_output=True, check=False
            ).returncode
            == 0
        )
    except OSError:
        return False


def compiler() -> list[str] | None:
    """The command of a C compiler: this machine's, or the one that came as a Python package."""
    if found := shutil.which("cc"):
        return [found]
    return [sys.executable, "-m", "ziglang", "cc"] if importlib.util.find_spec("ziglang") else None


COMMANDS = {  # on the PATH -> what brings it
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
NEEDS: dict[str, tuple[str, Callable[[], object]]] = {  # how to get it, and whether it is here
    **{name: (get, partial(shutil.which, name)) for name, get in COMMANDS.items()},
    "IPv6": ("enable it on the loopback interface", socket.has_dualstack_ipv6),
    "a C compiler": ("apt-get install gcc libc6-dev", compiler),
    "proton": (
        "apt-get install gcc python3-dev, and make clean",
        partial(importlib.util.find_spec, "proton"),
    ),
    "root": ("run the tests as root", lambda: os.geteuid() == 0),
    "the right to mount": ("run the tests as root, with unshare", _may_mount),
}


@cache
def is_here(name: str) -> bool:
    """Whether this machine has what ``NEEDS`` calls so."""
    return bool(NEEDS[name][1]())


def needs(*names: str) -> None:
    """Skip the test unless this machine has all of these, which ``NEEDS`` knows."""
    if missing := [name for name in names if not is_here(name)]:
        ways = dict.fromkeys(NEEDS[name][0] for name in missing)
        pytest.skip(f"needs {', '.join(missing)} ({'; '.join(ways)})")


def skip_summary(reasons: Iterable[str]) -> str:
    """What a run did not see, in one line: how many tests for want of what."""
    counted = Counter(reason.removeprefix("Skipped: ") for reason in reasons)
    return f"{counted.total()} skipped: " + ", ".join(
        f"{n} {reason}" for reason, n in counted.most_common()
    )


@contextmanager
def ordinary_user() -> Iterator[None]:
    """This process as somebody who is not root."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def compile_library(source: Path, library: Path) -> None:
    """A shared library of one file in C."""
    needs("a C compiler")
    command = compiler()
    assert command
    subprocess.run(
        [*command, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True
    )
