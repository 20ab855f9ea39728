"""What is delivered beside the package: the image's recipe, the unit, Kubernetes' manifests, examples."""

import re
import shutil
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import bcrypt
import kubernetes_validate
import pytest
import trustme
import yaml

from notbefore.commands.main import make_parser
from notbefore.config.load import load
from notbefore.config.model import default_state_dir
from notbefore.courier.orders import STOP_SECONDS
from notbefore.fleet.instance import STOP_PATIENCE
from notbefore.simulator.server import Simulator
from support.agent import eventually, free_port, run

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "config"
BIN = Path(sys.executable).parent
UNIT = CONFIG / "systemd" / "notbefore.service"
FLEET_UNIT = CONFIG / "systemd" / "notbefore-fleet.service"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MANIFESTS = sorted((CONFIG / "kubernetes").rglob("*.yaml"))
systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs Debian's package systemd")


@pytest.mark.parametrize(
    "command",
    [("hadolint", "Dockerfile"), ("shellcheck", "config/fleet/install.sh", "config/commands/webdevops.sh", ".ci/run")],
)
def test_the_recipe_and_the_scripts_are_clean(command: tuple[str, ...]) -> None:
    done = run(BIN / command[0], *(ROOT / word for word in command[1:]))
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(
    "command",
    [
        ("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *WORKFLOWS),
        ("check-jsonschema", "--builtin-schema", "vendor.dependabot", ROOT / ".github" / "dependabot.yml"),
        ("zizmor", "--offline", "--quiet", ROOT / ".github"),
    ],
    ids=lambda command: f"{command[0]} {command[2]}",
)
def test_the_workflows_are_clean(command: tuple[str | Path, ...]) -> None:
    said = run(BIN / command[0], *command[1:])
    assert said.returncode == 0, said.stdout + said.stderr


def test_every_action_is_named_by_its_digest() -> None:
    used = [line for path in WORKFLOWS for line in re.findall(r"uses: (.*)", path.read_text(encoding="utf-8"))]
    assert len(used) > 10
    assert [line for line in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", line)] == []


def test_the_image_runs_as_the_user_that_kubernetes_names() -> None:
    recipe = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    pod = manifest("DaemonSet")["spec"]["template"]["spec"]
    assert f"USER {pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}" in recipe
    assert 'CMD ["notbefore", "health"]' in recipe


# ---- systemd


units = pytest.mark.parametrize("unit", [UNIT, FLEET_UNIT], ids=lambda unit: unit.stem)


@systemd
@units
def test_the_unit_is_exposed_as_little_as_is_said(unit: Path) -> None:
    done = run("systemd-analyze", "security", "--offline=true", "--no-pager", unit)
    exposure = re.search(rf"Overall exposure level for {unit.name}: ([\d.]+)", done.stdout)
    assert exposure, done
    assert float(exposure[1]) <= 1.5


@systemd
@units
def test_systemd_has_nothing_to_say_of_the_unit(unit: Path, tmp_path: Path) -> None:
    here = tmp_path / unit.name
    here.write_text(unit.read_text(encoding="utf-8").replace("/opt/notbefore/bin/", f"{BIN}/"), encoding="utf-8")
    done = run("systemd-analyze", "verify", "--man=no", here)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@systemd
@pytest.mark.parametrize("name", ["access.md", "azure-monitor.md", "discovery.md"])
def test_the_unit_takes_the_drop_in_of_a_document(name: str, tmp_path: Path) -> None:
    (text,) = re.findall(r"```ini\n(.*?)```", (ROOT / "docs" / name).read_text(encoding="utf-8"), re.DOTALL)
    unit = UNIT.read_text(encoding="utf-8").replace("/opt/notbefore/bin/", f"{BIN}/")
    (tmp_path / UNIT.name).write_text(unit, encoding="utf-8")
    (tmp_path / f"{UNIT.name}.d").mkdir()
    (tmp_path / f"{UNIT.name}.d" / "override.conf").write_text(textwrap.dedent(text), encoding="utf-8")
    done = run("systemd-analyze", "verify", "--man=no", tmp_path / UNIT.name)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def settings_of(path: Path) -> dict[str, str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if re.match(r"\w+=", line))


def test_the_units_have_the_same_sandbox() -> None:
    agents, fleets = (
        path.read_text(encoding="utf-8").partition("CapabilityBoundingSet=")[2] for path in (UNIT, FLEET_UNIT)
    )
    assert agents
    assert agents == fleets


def test_the_fleets_unit_and_pod_give_partitions_and_courier_their_time() -> None:
    unit, seconds = settings_of(FLEET_UNIT), STOP_PATIENCE + STOP_SECONDS + 5
    assert unit["KillMode"] == "mixed", "the instance ends its courier"
    assert int(unit["TimeoutStopSec"]) > seconds
    assert manifest("Deployment")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > seconds
    options = make_parser(["fleet"]).parse_args(unit["ExecStart"].split()[1:])
    assert options.listen != load(None, {}, {}).server.listen, "an agent on the same machine has that port"


def test_the_unit_gives_the_courier_its_time() -> None:
    unit = settings_of(UNIT)
    assert unit["KillMode"] == "mixed", "the agent ends its courier"
    assert int(unit["TimeoutStopSec"]) > STOP_SECONDS + 5
    assert default_state_dir() == Path("/var/lib") / unit["StateDirectory"]


def test_the_unit_does_not_start_again_what_cannot_start(tmp_path: Path) -> None:
    unit = settings_of(UNIT)
    wrong = tmp_path / "notbefore.yml"
    wrong.write_text("sink: {}\n", encoding="utf-8")
    words = ("run", "--imds", "http://127.0.0.1:9", "--state-dir", tmp_path)
    configuration = run(BIN / "notbefore", *words, wrong).returncode
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = run(BIN / "notbefore", *words, "--listen", f"127.0.0.1:{taken.getsockname()[1]}").returncode
    assert unit["Restart"] == "always"
    assert unit["RestartPreventExitStatus"].split() == [str(configuration), str(address)]


# ---- Kubernetes


def manifest(kind: str, name: str | None = None) -> Any:
    """The manifest of this kind; ``name``: of several. Deployments are the fleet's, everything else is the agent's."""
    wanted = name or ("notbefore-fleet" if kind == "Deployment" else "notbefore")
    found = [values for path in MANIFESTS for values in yaml.safe_load_all(path.read_text(encoding="utf-8"))]
    (only,) = (one for one in found if (one["kind"], one.get("metadata", {}).get("name")) == (kind, wanted))
    return only


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_kubernetes_takes_it(path: Path) -> None:
    for values in yaml.safe_load_all(path.read_text(encoding="utf-8")):
        check_schema(values)


FOREIGN = {  # not Kubernetes' own: nobody has their schemas
    "Kustomization": "kustomize.config.k8s.io/v1beta1",
    "PodMonitor": "monitoring.coreos.com/v1",
    "PrometheusRule": "monitoring.coreos.com/v1",
    "Certificate": "cert-manager.io/v1",
    "Issuer": "cert-manager.io/v1",
}


def check_schema(values: Any) -> None:
    if values["kind"] in FOREIGN:
        assert values["apiVersion"] == FOREIGN[values["kind"]]
    else:
        kubernetes_validate.validate(values, kubernetes_validate.latest_version(), strict=True)


def built(directory: str) -> dict[tuple[str, str], Any]:
    """What an overlay amounts to, by kind and name: as much of kustomize as ours need."""
    place = (CONFIG / "kubernetes" / directory).resolve()
    values = yaml.safe_load((place / "kustomization.yaml").read_text(encoding="utf-8"))
    found: dict[tuple[str, str], Any] = {}
    for name in values["resources"]:
        if (place / name).is_dir():
            found |= built(str(place / name))
        else:
            documents = yaml.safe_load_all((place / name).read_text(encoding="utf-8"))
            found |= {(one["kind"], one["metadata"]["name"]): one for one in documents}
    for entry in values.get("configMapGenerator", ()):
        data = {name: (place / name).read_text(encoding="utf-8") for name in entry["files"]}
        found["ConfigMap", entry["name"]] = {"apiVersion": "v1", "kind": "ConfigMap", "data": data}
    for entry in values.get("patches", ()):
        patch = yaml.safe_load(entry["patch"])
        if isinstance(patch, list):
            item = found[entry["target"]["kind"], entry["target"]["name"]]
            for step in patch:
                apply(item, step["path"].strip("/").split("/"), step)
        else:
            key = (patch["kind"], patch["metadata"]["name"])
            found[key] = merged(found[key], patch)
    return found


def apply(item: Any, path: list[str], step: Any) -> None:
    assert step["op"] == "add"
    for part in path[:-1]:
        item = item[int(part) if isinstance(item, list) else part]
    assert path[-1] not in item
    item[path[-1]] = step["value"]


def merged(old: Any, new: Any) -> Any:
    """A strategic merge: of lists each item by its name."""
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {key: merged(old.get(key), value) for key, value in new.items()}
    if isinstance(old, list) and isinstance(new, list):
        names = [item["name"] for item in old]
        changed = {item["name"]: item for item in new}
        kept = [merged(item, changed[item["name"]]) if item["name"] in changed else item for item in old]
        return kept + [item for item in new if item["name"] not in names]
    return new


OVERLAYS = ("base", "open", "tls")
FLEET = "fleet-monitoring"


@pytest.mark.parametrize("directory", [*OVERLAYS, FLEET])
def test_an_overlay_amounts_to_what_kubernetes_takes_and_each_volume_is_mounted(directory: str) -> None:
    found = built(directory)
    for values in found.values():
        check_schema(values)
    (pods,) = (values for (kind, _), values in found.items() if kind in ("DaemonSet", "Deployment"))
    pod = pods["spec"]["template"]["spec"]
    assert {volume["name"] for volume in pod["volumes"]} == {
        mount["name"] for mount in pod["containers"][0]["volumeMounts"]
    }


if shutil.which("kubectl"):  # few have it, and Debian's is too old

    @pytest.mark.parametrize("directory", [*OVERLAYS, FLEET])
    def test_kustomize_builds_what_the_tests_build(directory: str) -> None:
        done = run("kubectl", "kustomize", CONFIG / "kubernetes" / directory)
        assert done.returncode == 0, done.stderr
        text = re.sub(r"(name: notbefore(?:-fleet)?)-[bcdfghkmt2456789]{10}$", r"\1", done.stdout, flags=re.MULTILINE)
        text = text.replace("image: notbefore:0.1.0", "image: notbefore")
        theirs = {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(text)}
        ours = built(directory)
        assert set(ours) == set(theirs)
        for key, values in ours.items():
            assert by_name(values.get("spec")) == by_name(theirs[key].get("spec"))
            assert values.get("data") == theirs[key].get("data")


def by_name(values: Any) -> Any:
    """Lists of things with names in the order of these."""
    if isinstance(values, dict):
        return {key: by_name(value) for key, value in values.items()}
    if isinstance(values, list):
        return sorted(map(by_name, values), key=lambda item: str(item.get("name")) if isinstance(item, dict) else "")
    return values


@pytest.mark.parametrize("directory", OVERLAYS)
def test_the_probes_ask_the_agent_of_the_overlay_and_prometheus_gets_in(directory: str, tmp_path: Path) -> None:
    """The overlay's own configuration and probes, with another port, and the pod's paths below a directory of ours."""
    port, web, overlay = free_port(), tmp_path / "run" / "notbefore-web", built(directory)
    text = overlay["ConfigMap", "notbefore"]["data"]["notbefore.yml"]
    text = text.replace("/run/notbefore-web", str(web)).replace(":10169", f":{port}")
    config = tmp_path / "notbefore.yml"
    values = yaml.safe_load(text) or {}
    values.setdefault("server", {}).setdefault("listen", f"127.0.0.1:{port}")  # not the usual one: others may have it
    config.write_text(yaml.safe_dump(values), encoding="utf-8")
    web.mkdir(parents=True)
    secrets = yaml.safe_load_all((CONFIG / "kubernetes/tls/secret.example.yaml").read_text(encoding="utf-8"))
    example = next(one for one in secrets if one["metadata"]["name"] == "notbefore-web")["stringData"]["web.yml"]
    hashed = bcrypt.hashpw(b"hunter2", bcrypt.gensalt(4)).decode()
    (web / "web.yml").write_text(re.sub(r"\$2b\$\S+", hashed, example), encoding="utf-8")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.crt")
    certificate = authority.issue_cert("notbefore.notbefore.svc")
    certificate.private_key_pem.write_to_path(web / "tls.key")
    certificate.cert_chain_pems[0].write_to_path(web / "tls.crt")

    pod = overlay["DaemonSet", "notbefore"]["spec"]["template"]["spec"]["containers"][0]
    probes = [pod[f"{name}Probe"]["exec"]["command"] for name in ("startup", "liveness", "readiness")]

    def asked(command: list[str]) -> int:
        words: list[str | Path] = [BIN / command[0], *command[1:-1], config]
        assert command[-1] == "/etc/notbefore/notbefore.yml"
        return run(*words).returncode

    with Simulator() as imds:
        order = ["run", str(config), "--imds", imds.endpoint, "--state-dir", str(tmp_path / "state")]
        agent = subprocess.Popen([BIN / "notbefore", *order], stdout=subprocess.DEVNULL)

        def probed() -> bool:
            assert agent.poll() is None
            return [asked(probe) for probe in probes] == [0, 0, 0]

        try:
            eventually(probed, 240)  # seconds: each is a process
            if directory == "tls":
                (endpoint,) = overlay["PodMonitor", "notbefore"]["spec"]["podMetricsEndpoints"]
                name = endpoint["tlsConfig"]["serverName"]
                url = f"{endpoint['scheme']}://{name}:{port}{endpoint['path']}"
                curl = (
                    "curl",
                    "--silent",
                    "--cacert",
                    tmp_path / "ca.crt",
                    "--resolve",
                    f"{name}:{port}:127.0.0.1",
                    url,
                )
                assert "notbefore_build_info" in run(*curl, "--user", "prometheus:hunter2").stdout
                assert "notbefore_build_info" not in run(*curl).stdout
        finally:
            agent.terminate()
            agent.wait(30)
    assert 0 not in [asked(probe) for probe in probes]


def test_only_an_overlay_that_says_so_listens_beyond_the_node() -> None:
    configurations = {name: built(name)["ConfigMap", "notbefore"]["data"]["notbefore.yml"] for name in OVERLAYS}
    servers = {name: yaml.safe_load(text).get("server", {}) for name, text in configurations.items()}
    assert "listen" not in servers["base"]
    assert {name: server.get("insecure", False) for name, server in servers.items()} == {
        "base": False, "open": True, "tls": False,
    }  # fmt: skip


@pytest.mark.parametrize("directory", ["base", "fleet", FLEET, "monitoring", "open", "rules", "tls"])
def test_a_kustomization_names_all_that_lies_beside_it(directory: str) -> None:
    place = CONFIG / "kubernetes" / directory
    values = yaml.safe_load((place / "kustomization.yaml").read_text(encoding="utf-8"))
    named = {name for name in values["resources"] if not name.startswith("..")}
    assert named == {path.name for path in place.glob("*.yaml")} - {"kustomization.yaml", "secret.example.yaml"}
    for generator in values.get("configMapGenerator", ()):
        for name in generator["files"]:
            load(place / name, {}, {})  # raises what is wrong


def test_the_instances_of_the_fleet_have_what_they_need_and_no_more() -> None:
    found = built(FLEET)
    fleet, name = found["Deployment", "notbefore-fleet"]["spec"], "notbefore-fleet"
    pod, (container,) = fleet["template"]["spec"], fleet["template"]["spec"]["containers"]
    assert found["Namespace", name]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    assert (pod["securityContext"]["runAsNonRoot"], pod["automountServiceAccountToken"]) == (True, False)
    assert (
        container["securityContext"]
        == manifest("DaemonSet")["spec"]["template"]["spec"]["containers"][0]["securityContext"]
    )
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted["state"] == str(default_state_dir())
    labels = fleet["selector"]["matchLabels"]
    assert labels.items() <= fleet["template"]["metadata"]["labels"].items()
    selecting = [found[kind, name]["spec"] for kind in ("PodDisruptionBudget", "PodMonitor")]
    assert [one["selector"]["matchLabels"] for one in selecting] == [labels, labels]
    assert found["NetworkPolicy", name]["spec"]["podSelector"]["matchLabels"] == labels
    ports = {
        found["PodMonitor", name]["spec"]["podMetricsEndpoints"][0]["port"],
        found["NetworkPolicy", name]["spec"]["ingress"][0]["ports"][0]["port"],
        *(container[f"{probe}Probe"]["httpGet"]["port"] for probe in ("startup", "liveness", "readiness")),
    }
    assert ports == {container["ports"][0]["name"]}
    config = yaml.safe_load(found["ConfigMap", name]["data"]["notbefore.yml"])
    assert config["server"]["listen"] == f":{container['ports'][0]['containerPort']}"
    assert config["fleet"]["checkpoints"], "several instances share their snapshots"
    assert pod["serviceAccountName"] == found["ServiceAccount", name]["metadata"]["name"]


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
    spaces = {manifest("Namespace", name)["metadata"]["name"] for name in ("notbefore", "notbefore-fleet")}
    assert set(re.findall(r"kubectl -n (\S+)", typed)) == spaces
    assert all((ROOT / place / "kustomization.yaml").exists() for place in re.findall(r"apply -k (config/\S+)", typed))
    commands = re.findall(r"exec POD -- (\S+)", typed)
    assert set(commands) == {"notbefore"}, "there is little else in the image"


# ---- configuration


def test_the_example_is_a_configuration_with_its_examples_and_without(tmp_path: Path) -> None:
    text = (CONFIG / "notbefore.yml").read_text(encoding="utf-8")
    whole = tmp_path / "notbefore.yml"
    # `# ` is prose; what is commented out begins at once, or with the two spaces of its indentation
    whole.write_text(re.sub(r"^#(?=[^ ]|  )", "", text, flags=re.MULTILINE), encoding="utf-8")
    for name in ("slack-url", "hook-key", "ping-url"):
        (tmp_path / name).write_text("https://hooks.example.org/x\n", encoding="utf-8")
    (tmp_path / "pager-key").write_text("0123456789abcdef0123456789abcdef\n", encoding="utf-8")
    assert load(CONFIG / "notbefore.yml", {}, {}) == load(None, {}, {})
    config = load(whole, {"CREDENTIALS_DIRECTORY": str(tmp_path)}, {})
    assert list(config.sinks) == ["oncall", "pager", "am", "hook"]
    assert len(config.routes) == 2


def test_the_windows_service_runs_the_agent() -> None:
    service = ET.parse(CONFIG / "windows" / "notbefore-service.xml").getroot()  # noqa: S314 - our own file
    assert (service.findtext("arguments") or "").startswith("run ")
