"""The wheel and the source distribution: built, looked into, installed beside nothing of this checkout, and run."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import notbefore

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("dist")
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", place], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    return place


@pytest.fixture(scope="module")
def prefix(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that holds the wheel; what it depends on is lent by the one that the tests run in."""
    place = tmp_path_factory.mktemp("opt") / "notbefore"
    assert run(sys.executable, "-m", "venv", "--without-pip", place).returncode == 0
    (wheel,) = dist.glob("*.whl")
    installed = run(sys.executable, "-m", "pip", "--python", place, "install", "--quiet", "--no-deps", wheel)
    assert installed.returncode == 0, installed.stderr
    lent = sysconfig.get_path("purelib")
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "lent.pth").write_text(f"{lent}\n", encoding="utf-8")
    return place


def test_the_wheel_holds_all_that_the_code_reads(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "src" / "notbefore"
    files = (path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert {f"notbefore/{path.relative_to(package).as_posix()}" for path in files} <= held
    assert any(name.endswith("share/notbefore/systemd/notbefore.service") for name in held)


def test_the_source_distribution_holds_what_the_documents_name(dist: Path) -> None:
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        held = {name.partition("/")[2] for name in tar.getnames()}
    assert {
        "docs/how-it-works.md",
        "config/notbefore.yml",
        "tests/conftest.py",
        "constraints.txt",
        "tools/reference.py",
    } <= held


def test_the_installed_command_tells_its_version(prefix: Path) -> None:
    told = run(prefix / "bin" / "notbefore", "--version")
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert version
    assert told.stdout == f"notbefore {version[1]}\n" == f"notbefore {notbefore.__version__}\n"


def test_the_installer_sets_up_the_service_and_keeps_what_is_there(prefix: Path, tmp_path: Path) -> None:
    install = prefix / "share" / "notbefore" / "fleet" / "install.sh"
    etc, units = tmp_path / "etc" / "notbefore", tmp_path / "etc" / "systemd" / "system"
    (etc / "credentials").mkdir(parents=True)
    (etc / "credentials" / "hook-key").write_text("key\n", encoding="utf-8")
    first = run(install, "--no-start", DESTDIR=str(tmp_path))
    assert (first.returncode, first.stderr) == (0, "")
    assert (
        f"ExecStart={prefix}/bin/notbefore run /etc/notbefore/notbefore.yml\n"
        in (units / "notbefore.service").read_text()
    )
    credentials = (units / "notbefore.service.d" / "credentials.conf").read_text(encoding="utf-8")
    assert credentials == "[Service]\nLoadCredential=hook-key:/etc/notbefore/credentials/hook-key\n"
    assert (etc / "credentials").stat().st_mode & 0o077 == 0

    mine = tmp_path / "mine.yml"
    mine.write_text(
        "sinks: {hook: {webhook: {url: 'https://example.org', secret_credential: hook-key}}}\n", encoding="utf-8"
    )
    assert run(install, "--no-start", "--config", mine, DESTDIR=str(tmp_path)).returncode == 0
    assert run(install, "--no-start", DESTDIR=str(tmp_path)).returncode == 0
    assert (etc / "notbefore.yml").read_text(encoding="utf-8") == mine.read_text(encoding="utf-8")

    wrong = tmp_path / "wrong.yml"
    wrong.write_text("sink: {}\n", encoding="utf-8")
    refused = run(install, "--no-start", "--config", wrong, DESTDIR=str(tmp_path))
    assert refused.returncode != 0
    assert f"{wrong}:1: sink" in refused.stderr
    assert (etc / "notbefore.yml").read_text(encoding="utf-8") == mine.read_text(encoding="utf-8")
    assert run(install, "--wrong", DESTDIR=str(tmp_path)).returncode == 1
