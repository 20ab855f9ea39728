"""The bundle, installed by ``install.sh`` in a network namespace without a network, and the package
that is in it.
"""

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
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
    """Run it where there is nothing but loopback."""
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


def bundled(place: Path) -> subprocess.CompletedProcess[str]:
    """For this Python and machine only, without extras: that is quicker."""
    only = {
        "EXTRAS": "",
        "PYTHONS": PYTHON,
        "MACHINES": os.uname().machine,
        "BIN": str(Path(sys.executable).parent),
    }
    return run(ROOT / "tools" / "bundle.sh", place, cwd=place, **only)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    needs("find", "tar", "gzip")
    place = tmp_path_factory.mktemp("dist")
    made = bundled(place)
    if "Could not find a version" in made.stderr or "Max retries" in made.stderr:
        pytest.skip(f"the package index cannot be reached: {made.stderr[-200:]}")
    assert made.returncode == 0, made.stderr
    (archive,) = place.glob("*.tar.gz")
    assert made.stdout.endswith(f"  {archive}\n")
    return archive


@pytest.fixture(scope="module")
def installed(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Another system's root, where the bundle was installed by the script that is in it."""
    place = tmp_path_factory.mktemp("system")
    with tarfile.open(bundle) as tar:
        # Python 3.11.2, which is Debian's, has none
        tar.extraction_filter = getattr(tarfile, "data_filter", None)
        tar.extractall(place)  # noqa: S202 - it was made by us
    (script,) = place.glob("*/install.sh")
    root = place / "root"
    root.mkdir()
    done = without_a_network(script, "--no-start", cwd=place, DESTDIR=str(root))
    assert done.returncode == 0, done.stderr
    yield root
    shutil.rmtree(place)


def test_installation_needs_nothing_of_the_clone(installed: Path, tmp_path: Path) -> None:
    prefix = installed / "opt" / "notbefore"
    etc = installed / "etc"
    unit = (etc / "systemd" / "system" / "notbefore.service").read_text(encoding="utf-8")

    assert f"ExecStart={prefix}/bin/notbefore run" in unit
    assert (etc / "notbefore" / "notbefore.yml").exists()

    demo = without_a_network(prefix / "bin" / "notbefore", "demo", cwd=tmp_path)

    assert demo.returncode == 0, demo.stderr
    assert "Freeze of this VM finished" in demo.stdout, demo.stderr
    assert str(ROOT) not in demo.stdout

    events = run(prefix / "bin" / "notbefore", "events", "--help", cwd=tmp_path)
    assert events.returncode == 0, events.stderr
    for path in (
        "systemd/notbefore-fleet.service",
        "dashboards/fleet.json",
        "helm/notbefore/files/vm.json",
    ):
        assert (prefix / "share" / "notbefore" / path).is_file(), path


def test_upgrade_from_an_archive_keeps_the_configuration(installed: Path, bundle: Path) -> None:
    own = installed / "etc" / "notbefore" / "notbefore.yml"
    before = own.read_text(encoding="utf-8")
    own.write_text(f"{before}\nlog: {{format: json}}\n", encoding="utf-8")

    done = without_a_network(
        INSTALL, "--bundle", bundle, "--no-start", cwd=installed, DESTDIR=str(installed)
    )

    assert done.returncode == 0, done.stderr
    assert "Installed, and not started" in done.stdout, done.stderr
    assert own.read_text(encoding="utf-8").endswith("log: {format: json}\n")


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
    assert (
        run(
            installed / "opt" / "notbefore" / "bin" / "notbefore", "--version", cwd=tmp_path
        ).returncode
        == 0
    )


def test_installer_refuses_a_file_that_is_no_bundle(tmp_path: Path) -> None:
    file = tmp_path / "bundle.tar.gz"
    file.write_bytes(b"\x1f\x8b")
    refused = run(
        INSTALL, "--bundle", file, "--no-start", cwd=tmp_path, DESTDIR=str(tmp_path / "root")
    )

    assert refused.returncode == 1
    assert f"{file}: not a bundle of notbefore" in refused.stderr


def test_installer_refuses_a_python_that_does_not_exist(bundle: Path, tmp_path: Path) -> None:
    elsewhere = {"DESTDIR": str(tmp_path / "root"), "PYTHON": "/nowhere/python3"}
    refused = run(INSTALL, "--bundle", bundle, "--no-start", cwd=tmp_path, **elsewhere)

    assert refused.returncode == 1
    assert "/nowhere/python3: Python 3.11 or later" in refused.stderr


def test_same_input_gives_the_same_bundle(bundle: Path, tmp_path: Path) -> None:
    assert bundled(tmp_path).returncode == 0
    assert (tmp_path / bundle.name).read_bytes() == bundle.read_bytes()


def of_cloud_init() -> str:
    values = yaml.safe_load(
        (ROOT / "config" / "fleet" / "cloud-init.yml").read_text(encoding="utf-8")
    )
    written = {entry["path"]: entry for entry in values["write_files"]}
    ((shell, script),) = values["runcmd"]
    assert shell == "sh"
    assert written[script]["permissions"] == "0600"
    return str(written[script]["content"])


def of_the_extension() -> str:
    text = (ROOT / "config" / "fleet" / "vm-extension.json").read_text(encoding="utf-8")
    return str(json.loads(text)["commandToExecute"])


def small() -> bytes:
    """A bundle with nothing but a script, which writes down that it ran: what the real one does is
    seen above.
    """
    script = b'#!/bin/sh\necho installed >"$DESTDIR/installed"\n'
    member = tarfile.TarInfo("notbefore-0.1.0-bundle/install.sh")
    member.size = len(script)  # /run and /tmp may be mounted noexec
    member.mode = 0o644
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        tar.addfile(member, io.BytesIO(script))
    return packed.getvalue()


@pytest.mark.parametrize(
    "script", [of_cloud_init(), of_the_extension()], ids=["cloud-init", "extension"]
)
def test_fleet_script_installs_only_the_bundle_with_its_hash(script: str, tmp_path: Path) -> None:
    needs("curl", "tar", "gzip")
    assert "pip" not in script, "nothing is taken from an index by its name"

    root = tmp_path / "root"
    authority = trustme.CA()
    bundle = small()
    root.mkdir()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    (tmp_path / "bin").mkdir()
    # it has nothing to do
    (tmp_path / "bin" / "apt-get").write_text("#!/bin/sh\n", encoding="utf-8")
    (tmp_path / "bin" / "apt-get").chmod(0o755)

    def install(words: str) -> subprocess.CompletedProcess[str]:
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        authorities = {"CURL_CA_BUNDLE": str(tmp_path / "ca.pem")}
        return run("sh", "-c", words, cwd=tmp_path, DESTDIR=str(root), PATH=path, **authorities)

    unfilled = install(script)

    assert unfilled.returncode == 1
    assert "fill in the address of the bundle (https://...) and its SHA-256" in unfilled.stderr

    with HttpPeer(authority) as server:
        server.default = Answer(body=bundle)
        script = script.replace("FILL-IN-BUNDLE-URL", f"{server.url}/bundle.tar.gz")
        wrong = install(script.replace("FILL-IN-BUNDLE-SHA256", "0" * 64))

        assert wrong.returncode == 1
        assert "did NOT match" in wrong.stderr
        assert list(root.iterdir()) == []

        done = install(script.replace("FILL-IN-BUNDLE-SHA256", hashlib.sha256(bundle).hexdigest()))
        assert done.returncode == 0, done.stderr
    assert (root / "installed").exists()
