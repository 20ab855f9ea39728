"""The wheel and the source distribution: built, looked into, installed beside nothing of this
checkout, and run.
"""

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from support.agent import run
from support.installed import environment
from support.needs import needs

ROOT = Path(__file__).parents[2]
Install = Callable[..., subprocess.CompletedProcess[str]]
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("dist")
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", place],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return place


@pytest.fixture(scope="module")
def prefix(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that holds the wheel.

    What it depends on is lent by the one that the tests run in.
    """
    (wheel,) = dist.glob("*.whl")
    return environment(tmp_path_factory.mktemp("opt") / "notbefore", wheel)


def test_wheel_contains_every_file_of_the_package(
    dist: Path,
) -> None:
    (wheel,) = dist.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "src" / "notbefore"
    files = (
        path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    )

    assert {f"notbefore/{path.relative_to(package).as_posix()}" for path in files} <= held
    assert any(name.endswith("share/notbefore/systemd/notbefore.service") for name in held)
    for completion in (
        "share/bash-completion/completions/notbefore",
        "share/zsh/site-functions/_notbefore",
        "share/fish/vendor_completions.d/notbefore.fish",
    ):
        assert any(name.endswith(f".data/data/{completion}") for name in held)


def test_readme_in_the_wheel_has_only_absolute_links(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]

    readme = archive.read(metadata).decode()

    assert re.findall(r"\]\((?!https:|#)([^)]*)\)", readme) == []


def test_source_distribution_contains_documents_tests_and_tools(dist: Path) -> None:
    with tarfile.open(next(dist.glob("*.tar.gz"))) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}

    assert names >= {
        "docs/how-it-works.md",
        "config/notbefore.yml",
        "tests/conftest.py",
        "constraints.txt",
        "tools/reference.py",
    }


@pytest.fixture
def destination() -> Iterator[Path]:
    """Another system's root, in a place where others than we may read."""
    needs("awk", "sed")
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        place.chmod(0o755)
        (place / "etc" / "notbefore").mkdir(parents=True)
        (place / "etc" / "notbefore" / "notbefore.yml").write_text("# healthy\n", encoding="utf-8")
        yield place


@pytest.fixture
def install(prefix: Path, destination: Path) -> Install:
    """The installer, for that root."""
    return partial(
        run, prefix / "share" / "notbefore" / "fleet" / "install.sh", DESTDIR=str(destination)
    )


def is_untouched(destination: Path) -> bool:
    etc = destination / "etc" / "notbefore"
    return (
        not list(etc.glob(".*"))
        and (etc / "notbefore.yml").read_text(encoding="utf-8") == "# healthy\n"
    )


def test_installer_sets_up_the_service_and_keeps_the_configuration(
    prefix: Path, destination: Path, install: Install, tmp_path: Path
) -> None:
    mine = tmp_path / "mine #&.yml"
    etc = destination / "etc" / "notbefore"
    units = destination / "etc" / "systemd" / "system"
    (etc / "notbefore.yml").unlink()
    (etc / "credentials").mkdir()
    (etc / "credentials" / "hook-key").write_text("key\n", encoding="utf-8")
    first = install("--no-start")

    assert first.returncode == 0
    assert first.stderr == ""

    unit = (units / "notbefore.service").read_text(encoding="utf-8")
    assert f"ExecStart={prefix}/bin/notbefore run /etc/notbefore/notbefore.yml\n" in unit

    credentials = (units / "notbefore.service.d" / "credentials.conf").read_text(encoding="utf-8")
    assert credentials == "[Service]\nLoadCredential=hook-key:/etc/notbefore/credentials/hook-key\n"

    local = destination / "usr" / "local"
    linked = (
        "bin/notbefore",
        "share/bash-completion/completions/notbefore",
        "share/zsh/site-functions/_notbefore",
        "share/fish/vendor_completions.d/notbefore.fish",
    )
    for name in linked:
        assert (local / name).readlink() == prefix / name
        assert (local / name).is_file()

    text = "sinks: {hook: {webhook: {url: 'https://example.org', secret_credential: hook-key}}}\n"
    mine.write_text(text, encoding="utf-8")

    assert install("--no-start", "--config", mine).returncode == 0
    assert install("--no-start").returncode == 0
    assert install("--config", etc / "notbefore.yml").returncode == 0, (
        "the file that is there already"
    )

    mine.write_text("sink: {}\n", encoding="utf-8")
    refused = install("--no-start", "--config", mine)

    assert refused.returncode == 1
    assert f"{mine}:1:1: sink" in refused.stderr
    assert (etc / "notbefore.yml").read_text(encoding="utf-8") == text
    assert install("--wrong").returncode == 1


@pytest.mark.parametrize("umask", ["000", "077"])
def test_installed_files_have_the_same_modes_under_any_umask(
    prefix: Path, destination: Path, umask: str
) -> None:
    script = prefix / "share" / "notbefore" / "fleet" / "install.sh"
    unit = destination / "etc" / "systemd" / "system" / "notbefore.service"
    unit.parent.mkdir(parents=True)
    unit.touch()
    unit.chmod(0o666)  # of an earlier installation
    (destination / "etc" / "notbefore" / "notbefore.yml").unlink()
    done = run("sh", "-c", f'umask {umask}; exec "$0" --no-start', script, DESTDIR=str(destination))

    assert done.returncode == 0
    assert done.stderr == ""

    made = {
        path.relative_to(destination).as_posix(): path
        for path in destination.rglob("*")
        if not path.is_symlink()
    }
    modes = {name: path.stat().st_mode & 0o777 for name, path in made.items()}

    assert modes.pop("etc/notbefore/credentials") == 0o700
    assert {
        name: mode
        for name, mode in modes.items()
        if mode != (0o755 if made[name].is_dir() else 0o644)
    } == {}
    assert {
        "etc/notbefore/notbefore.yml",
        "etc/systemd/system/notbefore.service.d/credentials.conf",
    } <= modes.keys()


def test_installer_refuses_a_secret_in_the_configuration(
    destination: Path, install: Install, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.yml"
    sinks = {
        "oncall": "{slack: {url: 'https://hooks.example.org/hunter2'}}",
        "query": "{webhook: {url: 'https://example.org/in?key=hunter2'}}",
        "path": "{webhook: {url: 'https://example.org/in/hunter2-is-a-long-one'}}",
        "key": "{webhook: {url: 'https://example.org/in', secret: hunter2}}",
    }
    mine.write_text(
        "sinks:\n" + "".join(f"  {name}: {sink}\n" for name, sink in sinks.items()),
        encoding="utf-8",
    )
    mine.chmod(0o600)
    refused = install("--config", mine)

    assert refused.returncode == 1
    for key in ("oncall.slack.url", "query.webhook.url", "path.webhook.url", "key.webhook.secret"):
        assert f"sinks.{key}" in refused.stderr
    assert "/etc/notbefore/credentials/NAME" in refused.stderr
    assert "hunter2" not in refused.stderr
    assert is_untouched(destination)

    credentials = destination / "etc" / "notbefore" / "credentials"
    (credentials / "slack-url").write_text("https://hooks.example.org/hunter2\n", encoding="utf-8")
    mine.write_text("sinks: {oncall: {slack: {url_credential: slack-url}}}\n", encoding="utf-8")

    assert install("--config", mine).returncode == 0
    assert (destination / "etc" / "notbefore" / "notbefore.yml").stat().st_mode & 0o777 == 0o644


def test_installer_refuses_a_prefix_with_special_characters_of_systemd(
    prefix: Path, destination: Path, tmp_path: Path
) -> None:
    other = tmp_path / "50% not"
    shutil.copytree(prefix, other, symlinks=True, ignore=shutil.ignore_patterns("lib", "include"))

    refused = run(other / "share" / "notbefore" / "fleet" / "install.sh", DESTDIR=str(destination))

    assert refused.returncode == 1
    assert "letters, digits and" in refused.stderr
    assert is_untouched(destination)


def test_uninstall_removes_the_service_and_keeps_state_and_configuration(
    destination: Path, install: Install
) -> None:
    units = destination / "etc" / "systemd" / "system"
    state = destination / "var" / "lib" / "notbefore"

    assert install().returncode == 0

    state.mkdir(parents=True)
    (state / "notbefore.db").write_bytes(b"")

    assert install("--purge").returncode == 1

    removed = install("--uninstall")

    assert removed.returncode == 0
    assert removed.stderr == ""
    assert not [path for path in (destination / "usr").rglob("*") if path.is_symlink()]
    assert list(units.iterdir()) == []
    assert (state / "notbefore.db").exists()
    assert is_untouched(destination)
    assert install("--uninstall", "--purge").returncode == 0
    assert not state.exists()
    assert not (destination / "etc" / "notbefore").exists()
