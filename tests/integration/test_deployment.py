"""What is delivered beside the package: the image's recipe, the unit, Kubernetes' manifests, examples."""

import re
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
from notbefore.courier.supervisor import STOP_SECONDS
from notbefore.fleet.instance import STOP_PATIENCE
from notbefore.simulator.server import Simulator
from support.agent import eventually, free_port, run
from support.chart import ACCESS, rendered
from support.needs import needs

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "config"
BIN = Path(sys.executable).parent
UNIT = CONFIG / "systemd" / "notbefore.service"
FLEET_UNIT = CONFIG / "systemd" / "notbefore-fleet.service"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MANIFESTS = sorted((CONFIG / "kubernetes").rglob("*.yaml"))


@pytest.mark.parametrize(
    "command",
    [
        ("hadolint", "Dockerfile"),
        ("shellcheck", "config/fleet/install.sh", "config/commands/webdevops.sh", ".ci/run", "tools/bundle.sh"),
    ],
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
    pod = agent_pod()
    assert f"USER {pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}" in recipe
    assert 'CMD ["notbefore", "health"]' in recipe


# ---- systemd


units = pytest.mark.parametrize("unit", [UNIT, FLEET_UNIT], ids=lambda unit: unit.stem)


@units
def test_the_unit_is_exposed_as_little_as_is_said(unit: Path) -> None:
    needs("systemd-analyze")
    done = run("systemd-analyze", "security", "--offline=true", "--no-pager", unit)
    exposure = re.search(rf"Overall exposure level for {unit.name}: ([\d.]+)", done.stdout)
    assert exposure, done
    assert float(exposure[1]) <= 1.5


def verify(unit: Path, place: Path) -> None:
    """Have systemd look at a unit and what is beside it in ``place``: it has nothing to say."""
    needs("systemd-analyze")
    here = place / unit.name
    here.write_text(unit.read_text(encoding="utf-8").replace("/opt/notbefore/bin/", f"{BIN}/"), encoding="utf-8")
    done = run("systemd-analyze", "verify", "--man=no", here)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@units
def test_systemd_has_nothing_to_say_of_the_unit(unit: Path, tmp_path: Path) -> None:
    verify(unit, tmp_path)


@pytest.mark.parametrize("name", ["access.md", "azure-monitor.md"])
def test_the_unit_takes_the_drop_in_of_a_document(name: str, tmp_path: Path) -> None:
    (text,) = re.findall(r"```ini\n(.*?)```", (ROOT / "docs" / name).read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / f"{UNIT.name}.d").mkdir()
    (tmp_path / f"{UNIT.name}.d" / "override.conf").write_text(textwrap.dedent(text), encoding="utf-8")
    verify(UNIT, tmp_path)


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
    assert (
        fleet()["Deployment", "notbefore-fleet"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > seconds
    )
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


def agent_pod() -> Any:
    """The pod of the agent, as the chart makes it."""
    return rendered({})["DaemonSet", "notbefore"]["spec"]["template"]["spec"]


def fleet() -> dict[tuple[str, str], Any]:
    """The manifests of `notbefore fleet`, by kind and name."""
    found = (values for path in MANIFESTS for values in yaml.safe_load_all(path.read_text(encoding="utf-8")))
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


def test_kubernetes_takes_the_fleets_manifests() -> None:
    for values in fleet().values():
        if values["kind"] == "PodMonitor":  # not Kubernetes' own: nobody has its schema
            assert values["apiVersion"] == "monitoring.coreos.com/v1"
        else:
            kubernetes_validate.validate(values, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("access", [*ACCESS, "fleet"])
def test_each_volume_is_mounted(access: str) -> None:
    found = fleet() if access == "fleet" else rendered(ACCESS[access])
    (pods,) = (values for (kind, _), values in found.items() if kind in ("DaemonSet", "Deployment"))
    pod = pods["spec"]["template"]["spec"]
    assert {volume["name"] for volume in pod["volumes"]} == {
        mount["name"] for mount in pod["containers"][0]["volumeMounts"]
    }


@pytest.mark.parametrize("access", ["node", "tls"])
def test_the_probes_ask_the_agent_of_the_chart_and_prometheus_gets_in(access: str, tmp_path: Path) -> None:
    """The chart's own configuration and probes, with another port, and the pod's paths below a directory of ours."""
    port, web, chart = free_port(), tmp_path / "run" / "notbefore-web", rendered(ACCESS[access])
    text = chart["ConfigMap", "notbefore"]["data"]["notbefore.yml"]
    text = text.replace("/run/notbefore-web", str(web)).replace(":10169", f":{port}")
    config = tmp_path / "notbefore.yml"
    values = yaml.safe_load(text) or {}
    values.setdefault("server", {}).setdefault("listen", f"127.0.0.1:{port}")  # not the usual one: others may have it
    config.write_text(yaml.safe_dump(values), encoding="utf-8")
    web.mkdir(parents=True)
    secrets = yaml.safe_load_all((CONFIG / "kubernetes/secret.example.yaml").read_text(encoding="utf-8"))
    example = next(one for one in secrets if one["metadata"]["name"] == "notbefore-web")["stringData"]["web.yml"]
    hashed = bcrypt.hashpw(b"hunter2", bcrypt.gensalt(4)).decode()
    (web / "web.yml").write_text(re.sub(r"\$2b\$\S+", hashed, example), encoding="utf-8")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.crt")
    certificate = authority.issue_cert("notbefore.notbefore.svc")
    certificate.private_key_pem.write_to_path(web / "tls.key")
    certificate.cert_chain_pems[0].write_to_path(web / "tls.crt")

    pod = chart["DaemonSet", "notbefore"]["spec"]["template"]["spec"]["containers"][0]
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
            if access == "tls":
                (endpoint,) = chart["PodMonitor", "notbefore"]["spec"]["podMetricsEndpoints"]
                name = endpoint["tlsConfig"]["serverName"]
                url = f"{endpoint['scheme']}://{name}:{port}{endpoint['path']}"
                needs("curl")
                host = f"{name}:{port}:127.0.0.1"
                curl = ("curl", "--silent", "--cacert", tmp_path / "ca.crt", "--resolve", host, url)
                assert "notbefore_build_info" in run(*curl, "--user", "prometheus:hunter2").stdout
                assert "notbefore_build_info" not in run(*curl).stdout
        finally:
            agent.terminate()
            agent.wait(30)
    assert 0 not in [asked(probe) for probe in probes]


def test_only_a_chart_that_is_asked_to_listens_beyond_the_node() -> None:
    texts = {name: rendered(ACCESS[name])["ConfigMap", "notbefore"]["data"]["notbefore.yml"] for name in ACCESS}
    servers = {name: yaml.safe_load(text).get("server", {}) for name, text in texts.items()}
    assert "listen" not in servers["node"]
    assert {name: server.get("insecure", False) for name, server in servers.items()} == {
        "node": False, "open": True, "tls": False,
    }  # fmt: skip


def test_the_instances_of_the_fleet_have_what_they_need_and_no_more() -> None:
    found, name = fleet(), "notbefore-fleet"
    pods = found["Deployment", name]["spec"]
    pod, (container,) = pods["template"]["spec"], pods["template"]["spec"]["containers"]
    assert found["Namespace", name]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    assert (pod["securityContext"]["runAsNonRoot"], pod["automountServiceAccountToken"]) == (True, False)
    assert container["securityContext"] == agent_pod()["containers"][0]["securityContext"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted["state"] == str(default_state_dir())
    labels = pods["selector"]["matchLabels"]
    assert labels.items() <= pods["template"]["metadata"]["labels"].items()
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
    pod = agent_pod()
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
    found = rendered(ACCESS["open"])
    assert port == found["PodMonitor", "notbefore"]["spec"]["podMetricsEndpoints"][0]["port"]
    assert port == found["NetworkPolicy", "notbefore"]["spec"]["ingress"][0]["ports"][0]["port"]


def test_the_documents_speak_of_these_pods() -> None:
    assert agent_pod()["containers"][0]["args"] == ["run", "/etc/notbefore/notbefore.yml"]
    typed = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    assert ("Namespace", "notbefore-fleet") in fleet()
    assert set(re.findall(r"kubectl -n (\S+)", typed)) == {"notbefore", "notbefore-fleet"}
    applied = re.findall(r"apply -f (config/\S+)", typed)
    assert applied
    assert all((ROOT / place).is_file() for place in applied)
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
