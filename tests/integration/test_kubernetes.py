"""Kubernetes: the Helm chart of the agent, as Helm's own library renders it, and the manifests of
the fleet.
"""

import json
import re
import subprocess
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import bcrypt
import helm_python
import kubernetes_validate
import pytest
import trustme
import yaml

from integration.test_deployment import BIN, CONFIG, ROOT, relabeled
from notbefore.config.load import load
from notbefore.config.model import default_state_dir
from notbefore.courier.supervisor import STOP_SECONDS
from notbefore.fleet.instance import HAND_OVER_PATIENCE
from notbefore.simulator.server import Simulator
from support.agent import eventually, free_port, run
from support.needs import needs

CHART: Final = CONFIG / "helm" / "notbefore"
# AKS offers the newest three versions, and older ones with long-term support: the oldest and the
# newest, because a field may be too new for the one or removed from the other
KUBERNETES: Final = ("1.29.0", kubernetes_validate.latest_version())
CUSTOM: Final = {  # api-versions of kinds that are not Kubernetes' own
    "PodMonitor": ("monitoring.coreos.com/v1", "azmonitoring.coreos.com/v1"),
    "PrometheusRule": ("monitoring.coreos.com/v1",),
    "Certificate": ("cert-manager.io/v1",),
    "Issuer": ("cert-manager.io/v1",),
}
PROBES: Final = ("startup", "liveness", "readiness")
Objects = dict[tuple[str, str], Any]  # by kind and name
# the three ways to reach the agents, in docs/getting-started.md
ACCESS: Final[dict[str, dict[str, Any]]] = {
    "node": {},
    "open": {"access": "open", "podMonitor": {"enabled": True}},
    "tls": {"access": "tls", "podMonitor": {"enabled": True}},
}
EVERYTHING: Final[dict[str, Any]] = {
    "image": {"repository": "registry.example.org/notbefore", "digest": "sha256:" + "0" * 64},
    "imagePullSecrets": [{"name": "pull"}],
    "access": "tls",
    "config": {
        "sinks": {"oncall": {"slack": {"url_file": "/run/notbefore/slack-url"}}},
        "routes": [{"match": {"event_type": ["Reboot"]}, "sinks": ["oncall"]}],
    },
    "secrets": {"name": "mine", "create": {"slack-url": "https://hooks.example.org/x"}},
    "tls": {
        "certManager": False,
        "certificate": "own",
        "ca": {"name": "ama-metrics-mtls-secret", "key": "ca.pem"},
    },
    "podMonitor": {
        "enabled": True,
        "apiVersion": "azmonitoring.coreos.com/v1",
        "namespace": "kube-system",
    },
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
    "dashboards": {"enabled": True, "annotations": {"grafana_folder": "Azure"}},
    "networkPolicy": {"enabled": False},
    "tolerations": [{"key": "spot", "operator": "Exists"}],
    "podAnnotations": {"a": "b"},
    "podLabels": {"team": "infra"},
    "env": [{"name": "OTEL_RESOURCE_ATTRIBUTES", "value": "a=b"}],
}


def rendered(
    values: dict[str, Any], *, name: str = "notbefore", namespace: str = "notbefore"
) -> Objects:
    """Return the objects that `helm template` gives."""
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        texts = chart.render(values, name=name, namespace=namespace)
    return by_name(text for path, text in texts.items() if path.endswith(".yaml"))


def fleet() -> Objects:
    """Return the manifests of `notbefore fleet`."""
    files = sorted((CONFIG / "kubernetes").glob("*.yaml"))
    return by_name(file.read_text(encoding="utf-8") for file in files)


def by_name(texts: Iterable[str]) -> Objects:
    """Return the objects in texts of YAML. No two of them have the same kind and name."""
    objects: Objects = {}
    for text in texts:
        for manifest in yaml.safe_load_all(text):
            if manifest is None:
                continue
            key = (manifest["kind"], manifest["metadata"]["name"])
            assert key not in objects
            objects[key] = manifest
    return objects


def pods_of(objects: Objects) -> Any:
    """Return the specification of the DaemonSet or Deployment."""
    by_kind = {kind: manifest for (kind, _), manifest in objects.items()}
    workload = by_kind.get("DaemonSet") or by_kind["Deployment"]
    return workload["spec"]


def agent_pod(values: dict[str, Any]) -> Any:
    """Return the specification of the agent's pods."""
    return pods_of(rendered(values))["template"]["spec"]


def config_of(values: dict[str, Any]) -> str:
    return str(rendered(values)["ConfigMap", "notbefore"]["data"]["notbefore.yml"])


def test_helm_lint_finds_no_fault_in_the_chart() -> None:
    result = helm_python.lint(CHART, EVERYTHING, strict=True)

    assert result["messages"] == []
    assert result["errors"] == []
    assert result["total_charts_linted"] == 1


def validate(objects: Objects) -> None:
    """Check manifests against the schemas of Kubernetes, and mounts against volumes."""
    for manifest in objects.values():
        kind = manifest["kind"]
        if kind in CUSTOM:
            assert manifest["apiVersion"] in CUSTOM[kind]
            continue
        for version in KUBERNETES:
            kubernetes_validate.validate(manifest, version, strict=True)

    pod = pods_of(objects)["template"]["spec"]
    mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert {volume["name"] for volume in pod["volumes"]} == mounts


@pytest.mark.parametrize("values", [*ACCESS.values(), EVERYTHING], ids=[*ACCESS, "everything"])
def test_chart_is_valid_for_the_kubernetes_versions_of_aks(values: dict[str, Any]) -> None:
    validate(rendered(values, name="other", namespace="elsewhere"))


def test_fleet_manifests_are_valid_for_the_kubernetes_versions_of_aks() -> None:
    validate(fleet())


def test_chart_renders_the_values_of_pods() -> None:
    pod = rendered(EVERYTHING)["DaemonSet", "notbefore"]["spec"]["template"]

    (container,) = pod["spec"]["containers"]
    assert container["image"] == "registry.example.org/notbefore@sha256:" + "0" * 64
    assert container["env"] == EVERYTHING["env"]
    assert pod["spec"]["imagePullSecrets"] == [{"name": "pull"}]
    assert pod["spec"]["tolerations"] == [{"key": "spot", "operator": "Exists"}]
    assert pod["metadata"]["annotations"].items() >= {"a": "b"}.items()
    assert pod["metadata"]["labels"].items() >= {"team": "infra"}.items()


def test_chart_renders_the_values_of_secrets() -> None:
    objects = rendered(EVERYTHING)

    pod = pods_of(objects)["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    web_sources = [source["secret"]["name"] for source in volumes["web"]["projected"]["sources"]]
    assert volumes["secrets"]["secret"]["secretName"] == "mine"
    assert objects["Secret", "mine"]["stringData"] == {"slack-url": "https://hooks.example.org/x"}
    assert web_sources == ["notbefore-web", "own"]


def test_chart_renders_the_values_of_the_pod_monitor() -> None:
    monitor = rendered(EVERYTHING)["PodMonitor", "notbefore"]

    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    authority = {"secret": {"name": "ama-metrics-mtls-secret", "key": "ca.pem"}}
    assert monitor["metadata"]["namespace"] == "kube-system"
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["notbefore"]}
    assert monitor["spec"]["labelLimit"] == 63
    assert endpoint["tlsConfig"]["ca"] == authority


def test_chart_leaves_out_objects_that_the_values_switch_off() -> None:
    kinds = {kind for kind, _ in rendered(EVERYTHING)}

    assert kinds.isdisjoint({"Certificate", "Issuer", "NetworkPolicy"})


def test_chart_mounts_secrets_that_it_does_not_create() -> None:
    values: dict[str, Any] = {
        "secrets": {"existingSecret": "mine"},
        "extraEnv": [
            {"name": "URL", "valueFrom": {"secretKeyRef": {"name": "other", "key": "url"}}}
        ],
        "extraVolumes": [{"name": "vault", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "vault", "mountPath": "/run/vault", "readOnly": True}],
        "config": {
            "sinks": {
                "a": {"slack": {"url_env": "URL"}},
                "b": {"slack": {"url": {"file": "/run/vault/url"}}},
            }
        },
    }

    objects = rendered(values)

    pod = objects["DaemonSet", "notbefore"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}

    assert volumes["secrets"]["secret"]["secretName"] == "mine"
    assert volumes["vault"] == values["extraVolumes"][0]
    assert values["extraVolumeMounts"][0] in container["volumeMounts"]
    assert container["env"] == values["extraEnv"]
    validate(objects)


def test_agent_loads_the_configuration_of_the_chart(tmp_path: Path) -> None:
    (tmp_path / "slack-url").write_text("https://hooks.example.org/x\n", encoding="utf-8")
    file = tmp_path / "notbefore.yml"
    text = config_of(EVERYTHING).replace("/run/notbefore/", f"{tmp_path}/")
    file.write_text(text, encoding="utf-8")

    config = load(file, {}, {})

    assert list(config.sinks) == ["oncall"]
    assert config.server.listen == ":10169"
    assert config.log.format == "json"


def test_changed_configuration_replaces_the_pods() -> None:
    def checksum(values: dict[str, Any]) -> str:
        pod = pods_of(rendered(values))["template"]
        return str(pod["metadata"]["annotations"]["checksum/config"])

    assert checksum({}) == checksum({"podLabels": {"a": "b"}})
    assert checksum({}) != checksum({"config": {"log": {"level": "debug"}}})
    assert checksum({}) != checksum({"access": "open"})


def test_pods_tolerate_every_taint() -> None:
    assert agent_pod({})["tolerations"] == [{"operator": "Exists"}]


def test_pods_avoid_virtual_nodes() -> None:
    affinity = agent_pod({})["affinity"]["nodeAffinity"]

    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"] == [
        {"key": "type", "operator": "NotIn", "values": ["virtual-kubelet"]}
    ]


def server_of(access: str) -> dict[str, Any]:
    """Return the settings of the agent's server with this access."""
    server = yaml.safe_load(config_of(ACCESS[access])).get("server", {})
    assert isinstance(server, dict)
    return server


def test_agent_listens_only_on_the_node_by_default() -> None:
    assert "listen" not in server_of("node")


@pytest.mark.parametrize(("access", "insecure"), [("node", False), ("open", True), ("tls", False)])
def test_agent_is_insecure_only_with_open_access(access: str, *, insecure: bool) -> None:
    assert server_of(access).get("insecure", False) == insecure


@pytest.mark.parametrize(
    ("values", "mistake"),
    [
        pytest.param(
            {"podMonitor": {"enabled": True}}, "set access to tls or open", id="monitor of node"
        ),
        pytest.param(
            {"config": {"server": {"listen": ":80"}}},
            "`access` (node, tls or open) sets it",
            id="listen",
        ),
        pytest.param({"access": "all"}, "access", id="access"),
        pytest.param(
            {"config": {"sinks": {"oncall": {"slack": {"url_fil": "x"}}}}}, "url_fil", id="key"
        ),
        pytest.param(
            {"config": {"sinks": {"oncall": {"slack": {"url": "https://x.example"}}}}},
            "url",
            id="secret in the configuration",
        ),
        pytest.param(
            {"config": {"sinks": {"a": {"pagerduty": {"routing_key": {"inline": "x"}}}}}},
            "routing_key",
            id="inline secret in the configuration",
        ),
        pytest.param(
            {"config": {"routes": [{"sinks": ["gone"]}]}}, "there is no sink gone", id="sink"
        ),
        pytest.param(
            {"config": {"routes": [{"fallback": "gone"}]}}, "there is no sink gone", id="fallback"
        ),
        pytest.param(
            {"secrets": {"existingSecret": "a", "create": {"b": "c"}}}, "not both", id="secrets"
        ),
    ],
)
def test_chart_refuses_values_that_cannot_work(values: dict[str, Any], mistake: str) -> None:
    with pytest.raises(helm_python.HelmError, match=re.escape(mistake)):
        rendered(values)


def test_chart_contains_the_rules_of_the_project() -> None:
    rules = (CONFIG / "prometheus" / "notbefore.rules.yml").read_text(encoding="utf-8")

    objects = rendered(EVERYTHING)

    assert objects["PrometheusRule", "notbefore"]["spec"] == yaml.safe_load(rules)


def test_chart_contains_the_dashboards_of_the_project() -> None:
    dashboards = {
        f"notbefore-{path.name}": json.loads(path.read_text(encoding="utf-8"))
        for path in (ROOT / "dashboards").glob("*.json")
    }

    rendered_dashboards: dict[str, Any] = {}
    for manifest in rendered(EVERYTHING).values():
        if manifest["metadata"].get("labels", {}).get("grafana_dashboard") == "1":
            assert len(json.dumps(manifest)) < 1024 * 1024  # the limit of a ConfigMap
            for name, text in manifest["data"].items():
                rendered_dashboards[name] = json.loads(text)

    assert rendered_dashboards == dashboards


def test_packaged_chart_contains_the_files_behind_its_links(tmp_path: Path) -> None:
    archive = helm_python.package(CHART, destination=tmp_path)

    with tarfile.open(archive) as tar:
        members = [member for member in tar if "/files/" in member.name]

    assert len(members) == len(list((CHART / "files").iterdir()))
    assert all(member.isreg() for member in members)  # no links


def snake_case(key: str) -> str:
    return re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", key)


def test_pod_monitor_names_the_node_and_the_job_of_the_rules(tmp_path: Path) -> None:
    monitor = rendered(ACCESS["open"])["PodMonitor", "notbefore"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    relabelings = [
        {snake_case(key): value for key, value in relabeling.items()}
        for relabeling in endpoint["relabelings"]
    ]

    (labels,) = relabeled(relabelings, tmp_path, {"__meta_kubernetes_pod_node_name": "aks-1"})

    assert labels["job"] == "notbefore"
    assert labels["instance"] == "aks-1"


class ChartAgent:
    """The agent that runs with the configuration of the chart, below a directory of the test.

    Its port is another one than the chart's, which another agent may use.
    """

    def __init__(self, chart: Objects, directory: Path) -> None:
        self.port = free_port()
        self.web = directory / "run" / "notbefore-web"
        self.web.mkdir(parents=True)
        self._config = directory / "notbefore.yml"
        self._state = directory / "state"
        container = pods_of(chart)["template"]["spec"]["containers"][0]
        self._probes = [container[f"{probe}Probe"]["exec"]["command"] for probe in PROBES]

        text = chart["ConfigMap", "notbefore"]["data"]["notbefore.yml"]
        text = text.replace("/run/notbefore-web", str(self.web))
        text = text.replace(":10169", f":{self.port}")
        values = yaml.safe_load(text) or {}
        values.setdefault("server", {}).setdefault("listen", f"127.0.0.1:{self.port}")
        self._config.write_text(yaml.safe_dump(values), encoding="utf-8")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the agent; wait until all probes succeed."""
        with Simulator() as imds:
            options = ["--imds", imds.endpoint, "--state-dir", str(self._state)]
            command: list[str | Path] = [BIN / "notbefore", "run", self._config, *options]
            with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
                try:
                    eventually(lambda: self.probe() == [0, 0, 0] or process.poll() is not None, 240)
                    assert process.poll() is None
                    yield
                finally:
                    process.terminate()

    def probe(self) -> list[int]:
        """Run the commands of the probes; return their exit codes."""
        codes: list[int] = []
        for program, *words, path in self._probes:
            assert path == "/etc/notbefore/notbefore.yml"
            codes.append(run(BIN / program, *words, self._config).returncode)
        return codes


def test_probes_succeed_while_the_agent_of_the_chart_runs(tmp_path: Path) -> None:
    agent = ChartAgent(rendered(ACCESS["node"]), tmp_path)

    with agent.running():
        pass

    assert 0 not in agent.probe()


def write_web_config(directory: Path, authority: trustme.CA) -> None:
    """Write the web configuration of the example, with the password hunter2, and a certificate."""
    secrets = by_name([(CONFIG / "kubernetes/secret.example.yaml").read_text(encoding="utf-8")])
    example = secrets["Secret", "notbefore-web"]["stringData"]["web.yml"]
    hashed = bcrypt.hashpw(b"hunter2", bcrypt.gensalt(4)).decode()
    (directory / "web.yml").write_text(re.sub(r"\$2b\$\S+", hashed, example), encoding="utf-8")

    certificate = authority.issue_cert("notbefore.notbefore.svc")
    certificate.private_key_pem.write_to_path(directory / "tls.key")
    certificate.cert_chain_pems[0].write_to_path(directory / "tls.crt")


def test_prometheus_reaches_the_agent_of_the_chart_over_tls(tmp_path: Path) -> None:
    needs("curl")
    chart = rendered(ACCESS["tls"])
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.crt")
    agent = ChartAgent(chart, tmp_path)
    write_web_config(agent.web, authority)
    (endpoint,) = chart["PodMonitor", "notbefore"]["spec"]["podMetricsEndpoints"]
    name = endpoint["tlsConfig"]["serverName"]
    url = f"{endpoint['scheme']}://{name}:{agent.port}{endpoint['path']}"
    resolve = f"{name}:{agent.port}:127.0.0.1"
    curl = ("curl", "--silent", "--cacert", tmp_path / "ca.crt", "--resolve", resolve, url)

    with agent.running():
        with_password = run(*curl, "--user", "prometheus:hunter2").stdout
        without_password = run(*curl).stdout

    assert "notbefore_build_info" in with_password
    assert "notbefore_build_info" not in without_password
    assert 0 not in agent.probe()


# ---- the pods of agents and fleet


NAMES: Final = ("notbefore", "notbefore-fleet")


def objects_of(name: str) -> Objects:
    if name == "notbefore-fleet":
        return fleet()
    return rendered(ACCESS["open"])


@pytest.mark.parametrize("name", NAMES)
def test_pods_run_without_privileges(name: str) -> None:
    pod = pods_of(objects_of(name))["template"]["spec"]

    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["securityContext"]["runAsNonRoot"]
    assert not pod["automountServiceAccountToken"]


@pytest.mark.parametrize("name", NAMES)
def test_pods_run_as_the_user_of_the_image(name: str) -> None:
    context = pods_of(objects_of(name))["template"]["spec"]["securityContext"]
    recipe = (ROOT / "Dockerfile").read_text(encoding="utf-8")

    assert f"USER {context['runAsUser']}:{context['runAsGroup']}\n" in recipe


def test_image_checks_its_health_by_a_command() -> None:
    recipe = (ROOT / "Dockerfile").read_text(encoding="utf-8")

    assert 'CMD ["notbefore", "health"]' in recipe


@pytest.mark.parametrize(
    ("name", "seconds"),
    [("notbefore", STOP_SECONDS), ("notbefore-fleet", HAND_OVER_PATIENCE + STOP_SECONDS)],
)
def test_pods_have_enough_time_to_stop(name: str, seconds: float) -> None:
    pod = pods_of(objects_of(name))["template"]["spec"]

    assert pod["terminationGracePeriodSeconds"] > seconds + 5


@pytest.mark.parametrize("name", NAMES)
def test_pods_mount_the_default_state_directory(name: str) -> None:
    (container,) = pods_of(objects_of(name))["template"]["spec"]["containers"]

    paths = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert paths["state"] == str(default_state_dir())


@pytest.mark.parametrize("name", NAMES)
def test_selectors_match_the_labels_of_the_pods(name: str) -> None:
    objects = objects_of(name)

    pods = pods_of(objects)
    labels = pods["selector"]["matchLabels"]
    assert labels.items() <= pods["template"]["metadata"]["labels"].items()
    assert objects["PodMonitor", name]["spec"]["selector"]["matchLabels"] == labels
    assert objects["NetworkPolicy", name]["spec"]["podSelector"]["matchLabels"] == labels


@pytest.mark.parametrize("name", NAMES)
def test_monitor_and_policy_name_the_port_of_the_pods(name: str) -> None:
    objects = objects_of(name)

    port = pods_of(objects)["template"]["spec"]["containers"][0]["ports"][0]
    (endpoint,) = objects["PodMonitor", name]["spec"]["podMetricsEndpoints"]
    ingress = objects["NetworkPolicy", name]["spec"]["ingress"][0]
    config = yaml.safe_load(objects["ConfigMap", name]["data"]["notbefore.yml"])
    assert endpoint["port"] == port["name"]
    assert ingress["ports"][0]["port"] == port["name"]
    assert config["server"]["listen"] == f":{port['containerPort']}"


# ---- the fleet


FLEET: Final = "notbefore-fleet"


def test_namespace_of_the_fleet_enforces_the_restricted_policy() -> None:
    labels = fleet()["Namespace", FLEET]["metadata"]["labels"]

    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


def test_disruption_budget_of_the_fleet_selects_its_pods() -> None:
    objects = fleet()

    selector = objects["PodDisruptionBudget", FLEET]["spec"]["selector"]
    assert selector == pods_of(objects)["selector"]


def test_pods_of_the_fleet_use_its_service_account() -> None:
    objects = fleet()

    account = objects["ServiceAccount", FLEET]["metadata"]["name"]
    assert pods_of(objects)["template"]["spec"]["serviceAccountName"] == account


def test_probes_of_the_fleet_name_the_port_of_its_pods() -> None:
    (container,) = pods_of(fleet())["template"]["spec"]["containers"]

    ports = [container[f"{probe}Probe"]["httpGet"]["port"] for probe in PROBES]
    assert ports == [container["ports"][0]["name"]] * 3


def test_instances_of_the_fleet_share_their_snapshots() -> None:
    config = yaml.safe_load(fleet()["ConfigMap", FLEET]["data"]["notbefore.yml"])

    assert config["fleet"]["checkpoints"]


# ---- the commands in the documents


@pytest.fixture(scope="module")
def documents() -> str:
    return "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))


def test_documents_use_the_namespaces_of_the_manifests(documents: str) -> None:
    assert set(re.findall(r"kubectl -n (\S+)", documents)) == {"notbefore", FLEET}


def test_documents_run_only_the_command_that_the_image_has(documents: str) -> None:
    assert set(re.findall(r"exec POD -- (\S+)", documents)) == {"notbefore"}


def test_documents_apply_files_of_the_repository(documents: str) -> None:
    files = re.findall(r"apply -f (config/\S+)", documents)

    assert files != []
    assert [file for file in files if not (ROOT / file).is_file()] == []
