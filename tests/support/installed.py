"""Installs notbefore into an environment of its own, in this version or in a newer one."""

import re
import shutil
import sys
import sysconfig
from pathlib import Path

from support import agent

ROOT = Path(__file__).parents[2]
# file -> the pattern and the text of the changes that make a newer version
NEWER = {
    "pyproject.toml": (r'(?m)^version = ".*"$', 'version = "9.9.9"'),
    "src/notbefore/__init__.py": (r'__version__ = ".*"', '__version__ = "9.9.9"'),
}


def run(*command: str | Path) -> None:
    done = agent.run(*command, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


def wheel(place: Path, changes: dict[str, tuple[str, str]]) -> Path:
    """Build a wheel of this working tree with these changes."""
    source = place / "source"
    shutil.copytree(
        ROOT, source, ignore=shutil.ignore_patterns(".*", "tests", "node_modules", "__pycache__")
    )
    for name, (pattern, text) in changes.items():
        path = source / name
        changed, count = re.subn(pattern, text, path.read_text(encoding="utf-8"))
        assert count == 1, name
        path.write_text(changed, encoding="utf-8")
    run("env", "-C", source, sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", place)
    return next(place.glob("*.whl"))


def install(place: Path, file: Path) -> None:
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        place,
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "-U",
        file,
    )


def environment(place: Path, file: Path) -> Path:
    """Make an environment, and install a wheel into it.

    The environment of the tests lends the dependencies.
    """
    run(sys.executable, "-m", "venv", "--without-pip", place)
    install(place, file)
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "lent.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    return place
