"""What is delivered beside the package: the image's recipe, the unit, Kubernetes' manifests, examples."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import kubernetes_validate
import pytest
import yaml

from notbefore.config.load import load
from notbefore.config.model import default_state_dir
from notbefore.delivery.orders import STOP_SECONDS

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "config"
BIN = Path(sys.executable).parent
UNIT = CONFIG / "systemd" / "notbefore.service"
MANIFESTS = sorted((CONFIG / "kubernetes").rglob("*.yaml"))
systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs Debian's package systemd")


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize("command", [("hadolint", "Dockerfile"), ("shellcheck", "config/fleet/install.sh", ".ci/run")])
def test_the_recipe_and_the_scripts_are_clean(command: tuple[str, ...]) -> None:
    told = run(BIN / command[0], *(ROOT / word for word in command[1:]))
    assert (told.returncode, told.stdout) == (0, "")


def test_the_image_runs_as_the_user_that_kubernetes_names() -> None:
    recipe = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    pod = manifest("DaemonSet")["spec"]["template"]["spec"]
    assert f"USER {pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}" in recipe
    assert 'CMD ["notbefore", "health"]' in recipe


# ---- systemd


@systemd
def test_the_unit_is_exposed_as_little_as_is_said() -> None:
    told = run("systemd-analyze", "security", "--offline=true", "--no-pager", UNIT)
    exposure = re.search(r"Overall exposure level for notbefore.service: ([\d.]+)", told.stdout)
    assert exposure, told
    assert float(exposure[1]) <= 1.5


@systemd
def test_systemd_has_nothing_to_say_of_the_unit(tmp_path: Path) -> None:
    here = tmp_path / UNIT.name
    here.write_text(UNIT.read_text(encoding="utf-8").replace("/opt/notbefore/bin/", f"{BIN}/"), encoding="utf-8")
    told = run("systemd-analyze", "verify", "--man=no", here)
    assert (told.returncode, told.stdout, told.stderr) == (0, "", "")


@systemd
@pytest.mark.parametrize("name", ["access.md", "azure-monitor.md", "discovery.md"])
def test_the_unit_takes_the_drop_in_of_a_document(name: str, tmp_path: Path) -> None:
    (text,) = re.findall(r"```ini\n(.*?)```", (ROOT / "docs" / name).read_text(encoding="utf-8"), re.DOTALL)
    unit = UNIT.read_text(encoding="utf-8").replace("/opt/notbefore/bin/", f"{BIN}/")
    (tmp_path / UNIT.name).write_text(unit, encoding="utf-8")
    (tmp_path / f"{UNIT.name}.d").mkdir()
    (tmp_path / f"{UNIT.name}.d" / "override.conf").write_text(textwrap.dedent(text), encoding="utf-8")
    told = run("systemd-analyze", "verify", "--man=no", tmp_path / UNIT.name)
    assert (told.returncode, told.stdout, told.stderr) == (0, "", "")


def test_the_unit_gives_the_courier_its_time() -> None:
    unit = dict(line.split("=", 1) for line in UNIT.read_text(encoding="utf-8").splitlines() if re.match(r"\w+=", line))
    assert unit["KillMode"] == "mixed", "the agent ends its courier"
    assert int(unit["TimeoutStopSec"]) > STOP_SECONDS + 5
    assert default_state_dir() == Path("/var/lib") / unit["StateDirectory"]


def test_the_unit_does_not_start_again_what_cannot_start(tmp_path: Path) -> None:
    unit = dict(line.split("=", 1) for line in UNIT.read_text(encoding="utf-8").splitlines() if re.match(r"\w+=", line))
    wrong = tmp_path / "notbefore.yml"
    wrong.write_text("sink: {}\n", encoding="utf-8")
    words = ("run", "--imds", "http://127.0.0.1:9", "--state-dir", tmp_path)
    configuration = run(BIN / "notbefore", *words, wrong).returncode
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = run(BIN / "notbefore", *words, "--listen", f"127.0.0.1:{taken.getsockname()[1]}").returncode
    assert unit["Restart"] == "always"
    assert unit["RestartPreventExitStatus"].split() == [str(configuration), str(address)]


# ---- Kubernetes


def manifest(kind: str) -> Any:
    found = [values for path in MANIFESTS for values in yaml.safe_load_all(path.read_text()) if values["kind"] == kind]
    (only,) = found
    return only


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_kubernetes_takes_it(path: Path) -> None:
    for values in yaml.safe_load_all(path.read_text(encoding="utf-8")):
        if values["kind"] in ("Kustomization", "PodMonitor"):  # not Kubernetes' own: nobody has their schemas
            assert values["apiVersion"].partition("/")[0] in ("kustomize.config.k8s.io", "monitoring.coreos.com")
        else:
            kubernetes_validate.validate(values, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("directory", ["base", "monitoring"])
def test_a_kustomization_names_all_that_lies_beside_it(directory: str) -> None:
    place = CONFIG / "kubernetes" / directory
    values = yaml.safe_load((place / "kustomization.yaml").read_text(encoding="utf-8"))
    named = {name for name in values["resources"] if not name.startswith("..")}
    assert named == {path.name for path in place.glob("*.yaml")} - {"kustomization.yaml", "secret.example.yaml"}
    for generator in values.get("configMapGenerator", ()):
        for name in generator["files"]:
            load(place / name, {}, {})  # raises what is wrong


def test_the_pods_have_what_the_agent_needs_and_no_more() -> None:
    pod = manifest("DaemonSet")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["hostNetwork"] is True
    assert pod["terminationGracePeriodSeconds"] > STOP_SECONDS + 5
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounted) == {volume["name"] for volume in pod["volumes"]}
    assert mounted["state"] == str(default_state_dir())
    port = container["ports"][0]["name"]
    assert port == manifest("PodMonitor")["spec"]["podMetricsEndpoints"][0]["port"]
    assert port == manifest("NetworkPolicy")["spec"]["ingress"][0]["ports"][0]["port"]


def test_the_documents_speak_of_these_pods() -> None:
    container = manifest("DaemonSet")["spec"]["template"]["spec"]["containers"][0]
    assert container["args"] == ["run", "/etc/notbefore/notbefore.yml"]
    typed = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    assert set(re.findall(r"kubectl -n (\S+)", typed)) == {manifest("Namespace")["metadata"]["name"]}
    assert all((ROOT / place / "kustomization.yaml").exists() for place in re.findall(r"apply -k (config/\S+)", typed))
    commands = re.findall(r"exec POD -- (\S+)", typed)
    assert set(commands) == {"notbefore"}, "there is little else in the image"


# ---- configuration


def test_the_example_is_a_configuration_with_its_examples_and_without(tmp_path: Path) -> None:
    text = (CONFIG / "notbefore.yml").read_text(encoding="utf-8")
    whole = tmp_path / "notbefore.yml"
    # `# ` is prose; what is commented out begins at once, or with the two spaces of its indentation
    whole.write_text(re.sub(r"^#(?=[^ ]|  )", "", text, flags=re.MULTILINE), encoding="utf-8")
    for name in ("slack-url", "hook-key"):
        (tmp_path / name).write_text("https://hooks.example.org/x\n", encoding="utf-8")
    assert load(CONFIG / "notbefore.yml", {}, {}) == load(None, {}, {})
    config = load(whole, {"CREDENTIALS_DIRECTORY": str(tmp_path)}, {})
    assert list(config.sinks) == ["oncall", "am", "hook"]
    assert len(config.routes) == 2


def test_what_a_fleet_is_given_installs_the_service() -> None:
    install = "/opt/notbefore/share/notbefore/fleet/install.sh"
    first_boot = yaml.safe_load((CONFIG / "fleet" / "cloud-init.yml").read_text(encoding="utf-8"))
    assert first_boot["runcmd"][-1] == install
    extension = json.loads((CONFIG / "fleet" / "vm-extension.json").read_text(encoding="utf-8"))
    assert extension["commandToExecute"].endswith(install)
    assert run("sh", "-n", "-c", extension["commandToExecute"]).returncode == 0


def test_the_windows_service_runs_the_agent() -> None:
    service = ET.parse(CONFIG / "windows" / "notbefore-service.xml").getroot()  # noqa: S314 - our own file
    assert (service.findtext("arguments") or "").startswith("run ")
