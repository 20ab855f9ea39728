"""The wheel and the source distribution: their files, and their installation."""

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
    directory = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(directory)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return directory


@pytest.fixture(scope="module")
def wheel(dist: Path) -> zipfile.ZipFile:
    (path,) = dist.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def prefix(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel. It uses the libraries of the environment of the tests."""
    (wheel,) = dist.glob("*.whl")
    return environment(tmp_path_factory.mktemp("opt") / "notbefore", wheel)


def test_wheel_contains_every_file_of_the_package(wheel: zipfile.ZipFile) -> None:
    package = ROOT / "src" / "notbefore"
    files = {
        f"notbefore/{path.relative_to(package).as_posix()}"
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }

    assert files <= set(wheel.namelist())


COMPLETIONS = (
    "share/bash-completion/completions/notbefore",
    "share/zsh/site-functions/_notbefore",
    "share/fish/vendor_completions.d/notbefore.fish",
)


@pytest.mark.parametrize("path", ["share/notbefore/systemd/notbefore.service", *COMPLETIONS])
def test_wheel_contains_files_outside_the_package(wheel: zipfile.ZipFile, path: str) -> None:
    assert [name for name in wheel.namelist() if name.endswith(f".data/data/{path}")]


def test_readme_in_the_wheel_has_only_absolute_links(wheel: zipfile.ZipFile) -> None:
    (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))

    readme = wheel.read(metadata).decode()

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


# ---- the installer


@pytest.fixture
def root() -> Iterator[Path]:
    """The root of an empty system, which every user may read."""
    needs("awk", "sed")
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        root.chmod(0o755)
        yield root


@pytest.fixture
def config(root: Path) -> Path:
    """A configuration that is there before the installation."""
    file = root / "etc" / "notbefore" / "notbefore.yml"
    file.parent.mkdir(parents=True)
    file.write_text("# healthy\n", encoding="utf-8")
    return file


@pytest.fixture
def install(prefix: Path, root: Path) -> Install:
    """Runs the installer for the root."""
    return partial(run, prefix / "share" / "notbefore" / "fleet" / "install.sh", DESTDIR=str(root))


def is_untouched(config: Path) -> bool:
    """Return whether the configuration has its old text, and no hidden file lies next to it."""
    hidden = list(config.parent.glob(".*"))
    return hidden == [] and config.read_text(encoding="utf-8") == "# healthy\n"


def add_credential(root: Path, name: str, text: str) -> None:
    file = root / "etc" / "notbefore" / "credentials" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def test_installer_sets_up_the_service(prefix: Path, root: Path, install: Install) -> None:
    result = install("--no-start")

    unit = (root / "etc" / "systemd" / "system" / "notbefore.service").read_text(encoding="utf-8")
    assert result.returncode == 0
    assert result.stderr == ""
    assert f"ExecStart={prefix}/bin/notbefore run /etc/notbefore/notbefore.yml\n" in unit


def test_installer_lets_the_service_load_the_credentials(root: Path, install: Install) -> None:
    add_credential(root, "hook-key", "key\n")

    install("--no-start")

    drop_in = root / "etc" / "systemd" / "system" / "notbefore.service.d" / "credentials.conf"
    assert drop_in.read_text(encoding="utf-8") == (
        "[Service]\nLoadCredential=hook-key:/etc/notbefore/credentials/hook-key\n"
    )


def test_installer_links_the_command_and_its_completions(
    prefix: Path, root: Path, install: Install
) -> None:
    install("--no-start")

    for name in ("bin/notbefore", *COMPLETIONS):
        link = root / "usr" / "local" / name
        assert link.readlink() == prefix / name
        assert link.is_file()


def test_installer_installs_a_configuration(root: Path, install: Install, tmp_path: Path) -> None:
    add_credential(root, "hook-key", "key\n")
    file = tmp_path / "mine #&.yml"
    hook = "{webhook: {url: 'https://example.org', secret_credential: hook-key}}"
    text = f"sinks: {{hook: {hook}}}\n"
    file.write_text(text, encoding="utf-8")

    result = install("--no-start", "--config", file)

    config = root / "etc" / "notbefore" / "notbefore.yml"
    assert result.returncode == 0
    assert config.read_text(encoding="utf-8") == text


def test_installer_keeps_the_configuration(config: Path, install: Install) -> None:
    without_option = install("--no-start")
    with_the_same_file = install("--no-start", "--config", config)

    assert without_option.returncode == 0
    assert with_the_same_file.returncode == 0
    assert is_untouched(config)


def test_installer_refuses_a_wrong_configuration(
    config: Path, install: Install, tmp_path: Path
) -> None:
    file = tmp_path / "mine.yml"
    file.write_text("sink: {}\n", encoding="utf-8")

    result = install("--no-start", "--config", file)

    assert result.returncode == 1
    assert f"{file}:1:1: sink" in result.stderr
    assert is_untouched(config)


def test_installer_refuses_an_unknown_option(config: Path, install: Install) -> None:
    result = install("--wrong")

    assert result.returncode == 1
    assert is_untouched(config)


@pytest.mark.parametrize("umask", ["000", "077"])
def test_installed_files_have_the_same_modes_under_any_umask(
    prefix: Path, root: Path, umask: str
) -> None:
    script = prefix / "share" / "notbefore" / "fleet" / "install.sh"
    unit = root / "etc" / "systemd" / "system" / "notbefore.service"
    unit.parent.mkdir(parents=True)
    unit.touch()
    unit.chmod(0o666)  # by an earlier installation

    result = run("sh", "-c", f'umask {umask}; exec "$0" --no-start', script, DESTDIR=str(root))

    assert result.returncode == 0
    assert result.stderr == ""
    modes: dict[str, int] = {}
    for path in root.rglob("*"):
        if not path.is_symlink():
            modes[path.relative_to(root).as_posix()] = path.stat().st_mode & 0o777
    assert modes.pop("etc/notbefore/credentials") == 0o700
    assert "etc/notbefore/notbefore.yml" in modes
    assert "etc/systemd/system/notbefore.service.d/credentials.conf" in modes
    for name, mode in modes.items():
        expected = 0o755 if (root / name).is_dir() else 0o644
        assert mode == expected, name


@pytest.mark.parametrize(
    ("sink", "key"),
    [
        ("{slack: {url: 'https://hooks.example.org/hunter2'}}", "slack.url"),
        ("{webhook: {url: 'https://example.org/in?key=hunter2'}}", "webhook.url"),
        ("{webhook: {url: 'https://example.org/in/hunter2-is-a-long-one'}}", "webhook.url"),
        ("{webhook: {url: 'https://example.org/in', secret: hunter2}}", "webhook.secret"),
    ],
    ids=["slack", "query", "path", "secret"],
)
def test_installer_refuses_a_secret_in_the_configuration(
    config: Path, install: Install, tmp_path: Path, sink: str, key: str
) -> None:
    file = tmp_path / "mine.yml"
    file.write_text(f"sinks: {{hook: {sink}}}\n", encoding="utf-8")
    file.chmod(0o600)

    result = install("--config", file)

    assert result.returncode == 1
    assert f"sinks.hook.{key}" in result.stderr
    assert "/etc/notbefore/credentials/NAME" in result.stderr
    assert "hunter2" not in result.stderr
    assert is_untouched(config)


def test_installer_accepts_a_secret_in_a_credential(
    root: Path, config: Path, install: Install, tmp_path: Path
) -> None:
    add_credential(root, "slack-url", "https://hooks.example.org/hunter2\n")
    file = tmp_path / "mine.yml"
    file.write_text("sinks: {oncall: {slack: {url_credential: slack-url}}}\n", encoding="utf-8")
    file.chmod(0o600)

    result = install("--config", file)

    assert result.returncode == 0
    assert config.stat().st_mode & 0o777 == 0o644


def test_installer_refuses_a_prefix_with_special_characters(
    prefix: Path, root: Path, config: Path, tmp_path: Path
) -> None:
    other = tmp_path / "50% not"  # `%` and blanks have a meaning in units
    shutil.copytree(prefix, other, symlinks=True, ignore=shutil.ignore_patterns("lib", "include"))

    result = run(other / "share" / "notbefore" / "fleet" / "install.sh", DESTDIR=str(root))

    assert result.returncode == 1
    assert "letters, digits and" in result.stderr
    assert is_untouched(config)


@pytest.fixture
def state(root: Path, config: Path, install: Install) -> Path:
    """The state directory of an installed agent with this configuration."""
    assert config.exists()
    result = install()
    assert result.returncode == 0, result.stderr
    directory = root / "var" / "lib" / "notbefore"
    directory.mkdir(parents=True)
    (directory / "notbefore.db").write_bytes(b"")
    return directory


def test_uninstall_removes_the_service_and_keeps_its_data(
    root: Path, config: Path, install: Install, state: Path
) -> None:
    result = install("--uninstall")

    assert result.returncode == 0
    assert result.stderr == ""
    assert [path for path in (root / "usr").rglob("*") if path.is_symlink()] == []
    assert list((root / "etc" / "systemd" / "system").iterdir()) == []
    assert (state / "notbefore.db").exists()
    assert is_untouched(config)


def test_uninstall_with_purge_removes_state_and_configuration(
    config: Path, install: Install, state: Path
) -> None:
    result = install("--uninstall", "--purge")

    assert result.returncode == 0
    assert not state.exists()
    assert not config.parent.exists()


def test_purge_without_uninstall_is_refused(config: Path, install: Install, state: Path) -> None:
    result = install("--purge")

    assert result.returncode == 1
    assert (state / "notbefore.db").exists()
    assert is_untouched(config)
