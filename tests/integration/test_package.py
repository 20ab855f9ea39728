"""The wheel and the source distribution: built, looked into, installed beside nothing of this checkout, and run."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

import notbefore
from support.agent import run
from support.needs import needs

ROOT = Path(__file__).parents[2]
INSTALLER = ("awk", "sed", "setpriv")


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


def test_what_this_module_makes_is_made_in_one_process(request: pytest.FixtureRequest) -> None:
    """A pytest that pytest-xdist does not know takes the groups away from it, and nobody says so."""
    grouping = request.config.getoption("loadgroup", default=False)
    assert not grouping or request.node.nodeid.endswith("@test_package")


def test_the_wheel_holds_all_that_the_code_reads(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "src" / "notbefore"
    files = (path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert {f"notbefore/{path.relative_to(package).as_posix()}" for path in files} <= held
    assert any(name.endswith("share/notbefore/systemd/notbefore.service") for name in held)


def test_every_link_of_the_readme_leads_somewhere_on_an_index(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    assert re.findall(r"\]\((?!https:|#)([^)]*)\)", archive.read(name).decode()) == []


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
    done = run(prefix / "bin" / "notbefore", "--version")
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert version
    assert done.stdout == f"notbefore {version[1]}\n" == f"notbefore {notbefore.__version__}\n"


@pytest.fixture
def destination() -> Iterator[Path]:
    """Another system's root, in a place where others than we may read."""
    needs(*INSTALLER)
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        place.chmod(0o755)
        (place / "etc" / "notbefore").mkdir(parents=True)
        (place / "etc" / "notbefore" / "notbefore.yml").write_text("# healthy\n", encoding="utf-8")
        yield place


def test_the_installer_sets_up_the_service_and_keeps_what_is_there(
    prefix: Path, destination: Path, tmp_path: Path
) -> None:
    install = prefix / "share" / "notbefore" / "fleet" / "install.sh"
    etc, units = destination / "etc" / "notbefore", destination / "etc" / "systemd" / "system"
    (etc / "notbefore.yml").unlink()
    (etc / "credentials").mkdir()
    (etc / "credentials" / "hook-key").write_text("key\n", encoding="utf-8")
    first = run(install, "--no-start", DESTDIR=str(destination))
    assert (first.returncode, first.stderr) == (0, "")
    assert (
        f'ExecStart="{prefix}/bin/notbefore" run /etc/notbefore/notbefore.yml\n'
        in (units / "notbefore.service").read_text()
    )
    credentials = (units / "notbefore.service.d" / "credentials.conf").read_text(encoding="utf-8")
    assert credentials == "[Service]\nLoadCredential=hook-key:/etc/notbefore/credentials/hook-key\n"
    assert (etc / "credentials").stat().st_mode & 0o077 == 0
    local = destination / "usr" / "local"
    for name in ("bin/notbefore", "share/man/man1/notbefore.1", "share/bash-completion/completions/notbefore"):
        assert (local / name).readlink() == prefix / name

    mine = tmp_path / "mine.yml"
    mine.write_text(
        "sinks: {hook: {webhook: {url: 'https://example.org', secret_credential: hook-key}}}\n", encoding="utf-8"
    )
    assert run(install, "--no-start", "--config", mine, DESTDIR=str(destination)).returncode == 0
    assert run(install, "--no-start", DESTDIR=str(destination)).returncode == 0
    assert (etc / "notbefore.yml").read_text(encoding="utf-8") == mine.read_text(encoding="utf-8")

    wrong = tmp_path / "wrong.yml"
    wrong.write_text("sink: {}\n", encoding="utf-8")
    refused = run(install, "--no-start", "--config", wrong, DESTDIR=str(destination))
    assert refused.returncode != 0
    assert f"{wrong}:1:1: sink" in refused.stderr
    assert (etc / "notbefore.yml").read_text(encoding="utf-8") == mine.read_text(encoding="utf-8")
    assert run(install, "--wrong", DESTDIR=str(destination)).returncode == 1


@pytest.mark.parametrize("umask", ["000", "077", "027"])
def test_whatever_umask_root_has_only_root_writes_and_the_service_reads(
    prefix: Path, destination: Path, umask: str
) -> None:
    install = prefix / "share" / "notbefore" / "fleet" / "install.sh"
    unit = destination / "etc" / "systemd" / "system" / "notbefore.service"
    unit.parent.mkdir(parents=True)
    unit.touch()
    unit.chmod(0o666)  # of an earlier installation
    (destination / "etc" / "notbefore" / "notbefore.yml").unlink()
    done = run("sh", "-c", f'umask {umask}; exec "$0" --no-start', install, DESTDIR=str(destination))
    assert (done.returncode, done.stderr) == (0, "")
    made = {path.relative_to(destination).as_posix(): path for path in destination.rglob("*") if not path.is_symlink()}
    modes = {name: path.stat().st_mode & 0o777 for name, path in made.items()}
    assert modes.pop("etc/notbefore/credentials") == 0o700
    assert {name: mode for name, mode in modes.items() if mode != (0o755 if made[name].is_dir() else 0o644)} == {}
    assert {"etc/notbefore/notbefore.yml", "etc/systemd/system/notbefore.service.d/credentials.conf"} <= modes.keys()


def installed(prefix: Path, destination: Path, config: str | Path) -> subprocess.CompletedProcess[str]:
    script = prefix / "share" / "notbefore" / "fleet" / "install.sh"
    return run(script, "--config", config, DESTDIR=str(destination))


def is_untouched(destination: Path) -> bool:
    etc = destination / "etc" / "notbefore"
    return not list(etc.glob(".*")) and (etc / "notbefore.yml").read_text(encoding="utf-8") == "# healthy\n"


SECRET_FILE = "sinks: {oncall: {slack: {url_file: slack-url}}}\n"
WEB_FILE = "server: {web_config_file: web.yml}\n"


@pytest.mark.parametrize(("config", "beside"), [(SECRET_FILE, "slack-url"), (WEB_FILE, "web.yml")])
def test_the_installer_looks_for_files_where_the_service_will(
    prefix: Path, destination: Path, tmp_path: Path, config: str, beside: str
) -> None:
    mine = tmp_path / "mine.yml"
    mine.write_text(config, encoding="utf-8")
    (tmp_path / beside).write_text("", encoding="utf-8")
    refused = installed(prefix, destination, mine)
    assert refused.returncode == 1
    assert f"{destination}/etc/notbefore/{beside}" in refused.stderr
    assert is_untouched(destination)


def test_the_installer_refuses_what_only_root_can_read(prefix: Path, destination: Path, tmp_path: Path) -> None:
    needs("root")
    etc = destination / "etc" / "notbefore"
    secret = etc / "slack-url"
    secret.write_text("https://hooks.example.org/x\n", encoding="utf-8")
    secret.chmod(0o600)
    mine = tmp_path / "mine.yml"
    mine.write_text(SECRET_FILE, encoding="utf-8")
    refused = installed(prefix, destination, mine)
    assert refused.returncode == 1
    assert f"{secret}: the service's user cannot read it" in refused.stderr
    assert "*_credential" in refused.stderr
    assert is_untouched(destination)
    secret.chmod(0o644)
    assert installed(prefix, destination, mine).returncode == 0
    (etc / "notbefore.yml").chmod(0o600)
    script = prefix / "share" / "notbefore" / "fleet" / "install.sh"
    assert f"{etc}/notbefore.yml: the service's user cannot read it" in run(script, DESTDIR=str(destination)).stderr


def test_the_installer_takes_a_key_that_a_group_of_the_service_can_read(
    prefix: Path, destination: Path, tmp_path: Path
) -> None:
    needs("root")
    etc = destination / "etc" / "notbefore"
    trustme.CA().issue_cert("vm.example.org").private_key_and_cert_chain_pem.write_to_path(etc / "server.pem")
    (etc / "server.pem").chmod(0o640)
    (etc / "web.yml").write_text("tls_server_config: {cert_file: server.pem, key_file: server.pem}\n", encoding="utf-8")
    mine = tmp_path / "mine.yml"
    mine.write_text(WEB_FILE, encoding="utf-8")
    refused = installed(prefix, destination, mine)
    assert f"{etc}/server.pem: the service's user cannot read it" in refused.stderr
    assert is_untouched(destination)
    os.chown(etc / "server.pem", 0, 20020)
    drop_in = destination / "etc" / "systemd" / "system" / "notbefore.service.d" / "override.conf"
    drop_in.write_text("[Service]\nSupplementaryGroups=20020\n", encoding="utf-8")
    taken = installed(prefix, destination, mine)
    assert (taken.returncode, taken.stderr) == (0, "")


def test_the_installer_takes_the_file_that_is_there_already(prefix: Path, destination: Path) -> None:
    own = destination / "etc" / "notbefore" / "notbefore.yml"
    taken = installed(prefix, destination, own)
    assert (taken.returncode, taken.stderr) == (0, "")
    assert is_untouched(destination)
    assert (destination / "etc" / "systemd" / "system" / "notbefore.service").exists()


@pytest.mark.parametrize(
    ("sink", "key"),
    [
        ("slack: {url: 'https://hooks.example.org/hunter2'}", "slack.url"),
        ("webhook: {url: 'https://example.org/in?key=hunter2'}", "webhook.url"),
        ("webhook: {url: 'https://example.org/in/hunter2-is-a-long-one'}", "webhook.url"),
        ("webhook: {url: 'https://example.org/in', secret: hunter2}", "webhook.secret"),
    ],
)
def test_the_installer_refuses_a_secret_in_the_configuration_and_says_where_to_move_it(
    prefix: Path, destination: Path, tmp_path: Path, sink: str, key: str
) -> None:
    mine = tmp_path / "mine.yml"
    mine.write_text(f"sinks: {{oncall: {{{sink}}}}}\n", encoding="utf-8")
    mine.chmod(0o600)
    refused = installed(prefix, destination, mine)
    assert refused.returncode == 1
    assert f"can read: sinks.oncall.{key}. " in refused.stderr
    assert "/etc/notbefore/credentials/NAME" in refused.stderr
    assert "hunter2" not in refused.stderr
    assert is_untouched(destination)
    credentials = destination / "etc" / "notbefore" / "credentials"
    (credentials / "slack-url").write_text("https://hooks.example.org/hunter2\n", encoding="utf-8")
    mine.write_text("sinks: {oncall: {slack: {url_credential: slack-url}}}\n", encoding="utf-8")
    assert installed(prefix, destination, mine).returncode == 0
    assert (destination / "etc" / "notbefore" / "notbefore.yml").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("name", ["not before", "a#b&c", "50% more"])
def test_the_installer_takes_a_prefix_with_signs_that_mean_something(
    prefix: Path, destination: Path, tmp_path: Path, name: str
) -> None:
    other = tmp_path / name
    shutil.copytree(prefix, other, symlinks=True)
    (other / "bin" / "notbefore").write_text(f'#!/bin/sh\nexec "{prefix}/bin/notbefore" "$@"\n', encoding="utf-8")
    wrong = tmp_path / "wrong #&.yml"
    wrong.write_text("sink: {}\n", encoding="utf-8")
    assert f"{wrong}:1:1: sink" in installed(other, destination, wrong).stderr
    done = run(other / "share" / "notbefore" / "fleet" / "install.sh", DESTDIR=str(destination))
    assert (done.returncode, done.stderr) == (0, "")
    unit = destination / "etc" / "systemd" / "system" / "notbefore.service"
    (line,) = re.findall(r'ExecStart="(.*)" run', unit.read_text(encoding="utf-8"))
    assert line.replace("%%", "%") == f"{other}/bin/notbefore"
    needs("systemd-analyze")
    verified = run("systemd-analyze", "verify", "--man=no", unit)
    assert (verified.returncode, verified.stdout, verified.stderr) == (0, "", "")


def test_the_installer_says_that_systemd_runs_nothing_from_there(
    prefix: Path, destination: Path, tmp_path: Path
) -> None:
    other = tmp_path / "it's"
    shutil.copytree(prefix, other, symlinks=True)
    refused = run(other / "share" / "notbefore" / "fleet" / "install.sh", DESTDIR=str(destination))
    assert (refused.returncode, "a quote or a backslash" in refused.stderr) == (1, True)


def test_the_installer_removes_the_service_and_keeps_what_is_the_users(prefix: Path, destination: Path) -> None:
    script = prefix / "share" / "notbefore" / "fleet" / "install.sh"
    units, state = destination / "etc" / "systemd" / "system", destination / "var" / "lib" / "notbefore"
    assert run(script, DESTDIR=str(destination)).returncode == 0
    state.mkdir(parents=True)
    (state / "notbefore.db").write_bytes(b"")
    assert run(script, "--purge", DESTDIR=str(destination)).returncode == 1
    removed = run(script, "--uninstall", DESTDIR=str(destination))
    assert (removed.returncode, removed.stderr) == (0, "")
    assert not (destination / "usr" / "local" / "bin" / "notbefore").is_symlink()
    assert list(units.iterdir()) == []
    assert (state / "notbefore.db").exists()
    assert is_untouched(destination)
    assert run(script, "--uninstall", "--purge", DESTDIR=str(destination)).returncode == 0
    assert not state.exists()
    assert not (destination / "etc" / "notbefore").exists()
