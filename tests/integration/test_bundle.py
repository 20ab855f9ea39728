"""The bundle: what is in it, and its installation without a network."""

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest
import trustme
import yaml

from support import agent
from support.needs import needs
from support.peers import Answer, HttpPeer

ROOT: Final = Path(__file__).parents[2]
PYTHON: Final = f"{sys.version_info.major}.{sys.version_info.minor}"
INSTALL: Final = ROOT / "config" / "fleet" / "install.sh"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(sys.platform != "linux", reason="a bundle is for Linux"),
]


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = [
        f"{name}={value}" for name, value in {"PYTHON": sys.executable, **environment}.items()
    ]
    return agent.run(
        "env", "-u", "PYTHONPATH", "-u", "VIRTUAL_ENV", "-C", cwd, *variables, *command
    )


def without_a_network(
    *command: str | Path, cwd: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command where the only network is loopback."""
    needs("root", "unshare", "ip", "awk", "sed", "tar", "gzip")
    return run(
        "unshare",
        "--net",
        "sh",
        "-c",
        'ip link set lo up; exec "$@"',
        "sh",
        *command,
        cwd=cwd,
        **environment,
    )


def bundled(directory: Path) -> subprocess.CompletedProcess[str]:
    """Build a bundle for this Python and machine only, without extras, which is faster."""
    choice = {
        "EXTRAS": "",
        "PYTHONS": PYTHON,
        "MACHINES": os.uname().machine,
        "BIN": str(Path(sys.executable).parent),
    }
    return run(ROOT / "tools" / "bundle.sh", directory, cwd=directory, **choice)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    needs("find", "tar", "gzip")
    directory = tmp_path_factory.mktemp("dist")
    result = bundled(directory)
    if "Could not find a version" in result.stderr or "Max retries" in result.stderr:
        pytest.skip(f"the package index cannot be reached: {result.stderr[-200:]}")
    assert result.returncode == 0, result.stderr
    (archive,) = directory.glob("*.tar.gz")
    assert result.stdout.endswith(f"  {archive}\n")
    return archive


@pytest.fixture(scope="module")
def installed(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The root of another system, where the script in the bundle has installed it."""
    directory = tmp_path_factory.mktemp("system")
    with tarfile.open(bundle) as tar:
        # Debian's Python 3.11.2 has no filter
        tar.extraction_filter = getattr(tarfile, "data_filter", None)
        tar.extractall(directory)  # noqa: S202 - the bundle is the test's own
    (script,) = directory.glob("*/install.sh")
    root = directory / "root"
    root.mkdir()
    result = without_a_network(script, "--no-start", cwd=directory, DESTDIR=str(root))
    assert result.returncode == 0, result.stderr
    yield root
    shutil.rmtree(directory)


def test_installation_sets_up_the_service(installed: Path) -> None:
    etc = installed / "etc"

    unit = (etc / "systemd" / "system" / "notbefore.service").read_text(encoding="utf-8")

    assert f"ExecStart={installed}/opt/notbefore/bin/notbefore run" in unit
    assert (etc / "notbefore" / "notbefore.yml").exists()


def test_demo_of_the_installation_needs_neither_network_nor_clone(
    installed: Path, tmp_path: Path
) -> None:
    command = installed / "opt" / "notbefore" / "bin" / "notbefore"

    demo = without_a_network(command, "demo", cwd=tmp_path)

    assert demo.returncode == 0, demo.stderr
    assert "Freeze of this VM finished" in demo.stdout, demo.stderr
    assert str(ROOT) not in demo.stdout


def test_installed_command_prints_its_help(installed: Path, tmp_path: Path) -> None:
    command = installed / "opt" / "notbefore" / "bin" / "notbefore"

    events = run(command, "events", "--help", cwd=tmp_path)

    assert events.returncode == 0, events.stderr


@pytest.mark.parametrize(
    "path",
    [
        "systemd/notbefore-fleet.service",
        "dashboards/fleet.json",
        "helm/notbefore/files/vm.json",
    ],
)
def test_installation_has_the_files_next_to_the_package(installed: Path, path: str) -> None:
    assert (installed / "opt" / "notbefore" / "share" / "notbefore" / path).is_file()


def test_upgrade_from_an_archive_keeps_the_configuration(installed: Path, bundle: Path) -> None:
    config = installed / "etc" / "notbefore" / "notbefore.yml"
    before = config.read_text(encoding="utf-8")
    config.write_text(f"{before}\nlog: {{format: json}}\n", encoding="utf-8")

    result = without_a_network(
        INSTALL, "--bundle", bundle, "--no-start", cwd=installed, DESTDIR=str(installed)
    )

    assert result.returncode == 0, result.stderr
    assert "Installed, and not started" in result.stdout, result.stderr
    assert config.read_text(encoding="utf-8").endswith("log: {format: json}\n")


def test_changed_wheel_is_refused_and_the_running_version_stays(
    installed: Path, bundle: Path, tmp_path: Path
) -> None:
    changed = tmp_path / "changed.tar.gz"
    with tarfile.open(bundle) as old, tarfile.open(changed, "w:gz") as new:
        for member in old:
            file = old.extractfile(member)
            assert file is not None
            data = file.read()
            if "/azure_notbefore-" in member.name:
                data += b"\0"
            member.size = len(data)
            new.addfile(member, io.BytesIO(data))

    refused = without_a_network(
        INSTALL, "--bundle", changed, "--no-start", cwd=tmp_path, DESTDIR=str(installed)
    )

    assert refused.returncode == 1
    assert "DO NOT MATCH THE HASHES" in refused.stderr
    assert "nothing of the running service has changed" in refused.stderr

    version = run(installed / "opt" / "notbefore" / "bin" / "notbefore", "--version", cwd=tmp_path)
    assert version.returncode == 0


def test_installer_refuses_a_file_that_is_no_bundle(tmp_path: Path) -> None:
    file = tmp_path / "bundle.tar.gz"
    file.write_bytes(b"\x1f\x8b")

    refused = run(
        INSTALL, "--bundle", file, "--no-start", cwd=tmp_path, DESTDIR=str(tmp_path / "root")
    )

    assert refused.returncode == 1
    assert f"{file}: not a bundle of notbefore" in refused.stderr


def test_installer_refuses_a_python_that_does_not_exist(bundle: Path, tmp_path: Path) -> None:
    variables = {"DESTDIR": str(tmp_path / "root"), "PYTHON": "/nowhere/python3"}

    refused = run(INSTALL, "--bundle", bundle, "--no-start", cwd=tmp_path, **variables)

    assert refused.returncode == 1
    assert "/nowhere/python3: Python 3.11 or later" in refused.stderr


def test_same_input_gives_the_same_bundle(bundle: Path, tmp_path: Path) -> None:
    result = bundled(tmp_path)

    assert result.returncode == 0
    assert (tmp_path / bundle.name).read_bytes() == bundle.read_bytes()


# ---- the scripts with which a fleet installs the bundle


def cloud_init_script() -> str:
    text = (ROOT / "config" / "fleet" / "cloud-init.yml").read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    files = {entry["path"]: entry for entry in values["write_files"]}
    ((shell, script),) = values["runcmd"]
    assert shell == "sh"
    assert files[script]["permissions"] == "0600"
    return str(files[script]["content"])


def extension_script() -> str:
    text = (ROOT / "config" / "fleet" / "vm-extension.json").read_text(encoding="utf-8")
    return str(json.loads(text)["commandToExecute"])


@pytest.fixture(params=[cloud_init_script, extension_script], ids=["cloud-init", "extension"])
def script(request: pytest.FixtureRequest) -> str:
    needs("curl", "tar", "gzip")
    return str(request.param())


@cache  # because gzip writes the time into an archive
def small_bundle() -> bytes:
    """Return a bundle whose script only writes that it ran."""
    script = b'#!/bin/sh\necho installed >"$DESTDIR/installed"\n'
    member = tarfile.TarInfo("notbefore-0.1.0-bundle/install.sh")
    member.size = len(script)
    member.mode = 0o644  # not executable, as where /run and /tmp are mounted noexec
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        tar.addfile(member, io.BytesIO(script))
    return archive.getvalue()


class NewVm:
    """The directory in which a script of the fleet runs, with a server that has the bundle."""

    def __init__(self, directory: Path, authority: trustme.CA) -> None:
        self._directory = directory
        self.root = directory / "root"
        self.root.mkdir()
        self._ca_file = directory / "ca.pem"
        authority.cert_pem.write_to_path(self._ca_file)
        self._programs = directory / "bin"
        self._programs.mkdir()
        apt_get = self._programs / "apt-get"  # has nothing to do
        apt_get.write_text("#!/bin/sh\n", encoding="utf-8")
        apt_get.chmod(0o755)

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        return run(
            "sh",
            "-c",
            script,
            cwd=self._directory,
            DESTDIR=str(self.root),
            PATH=f"{self._programs}:{os.environ['PATH']}",
            CURL_CA_BUNDLE=str(self._ca_file),
        )


@pytest.fixture
def vm(tmp_path: Path, authority: trustme.CA) -> NewVm:
    return NewVm(tmp_path, authority)


@pytest.fixture
def server(authority: trustme.CA) -> Iterator[HttpPeer]:
    """A server that answers each request with the bundle."""
    with HttpPeer(authority) as server:
        server.default = Answer(body=small_bundle())
        yield server


def filled_in(script: str, server: HttpPeer, digest: str) -> str:
    with_url = script.replace("FILL-IN-BUNDLE-URL", f"{server.url}/bundle.tar.gz")
    return with_url.replace("FILL-IN-BUNDLE-SHA256", digest)


def test_fleet_script_takes_nothing_from_a_package_index(script: str) -> None:
    assert "pip" not in script


def test_fleet_script_asks_for_the_address_and_the_hash(script: str, vm: NewVm) -> None:
    result = vm.run(script)

    assert result.returncode == 1
    assert "fill in the address of the bundle (https://...) and its SHA-256" in result.stderr


def test_fleet_script_refuses_a_bundle_with_another_hash(
    script: str, vm: NewVm, server: HttpPeer
) -> None:
    result = vm.run(filled_in(script, server, "0" * 64))

    assert result.returncode == 1
    assert "did NOT match" in result.stderr
    assert list(vm.root.iterdir()) == []


def test_fleet_script_installs_the_bundle_with_its_hash(
    script: str, vm: NewVm, server: HttpPeer
) -> None:
    digest = hashlib.sha256(small_bundle()).hexdigest()

    result = vm.run(filled_in(script, server, digest))

    assert result.returncode == 0, result.stderr
    assert (vm.root / "installed").exists()
