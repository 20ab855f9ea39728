"""Kubernetes: the Helm chart of the agent, as Helm's own library renders it, and the manifests of
the fleet.
"""

import json
import re
import subprocess
import tarfile
from collections.abc import Iterable
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
# AKS offers the newest three versions, and older ones with long-term support: what the oldest has
# not yet and the newest no longer, either of these two says
KUBERNETES: Final = ("1.29.0", kubernetes_validate.latest_version())
CUSTOM: Final = {  # not Kubernetes' own
    "PodMonitor": ("monitoring.coreos.com/v1", "azmonitoring.coreos.com/v1"),
    "PrometheusRule": ("monitoring.coreos.com/v1",),
    "Certificate": ("cert-manager.io/v1",),
    "Issuer": ("cert-manager.io/v1",),
}
Objects = dict[tuple[str, str], Any]  # by kind and name
ACCESS: Final[
    dict[str, dict[str, Any]]
] = {  # who may ask the agents: the values that docs/getting-started.md names
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
    """The objects that `helm template` gives."""
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        texts = chart.render(values, name=name, namespace=namespace)
    return by_name(text for path, text in texts.items() if path.endswith(".yaml"))


def fleet() -> Objects:
    """The manifests of `notbefore fleet`."""
    return by_name(
        path.read_text(encoding="utf-8") for path in sorted((CONFIG / "kubernetes").glob("*.yaml"))
    )


def by_name(texts: Iterable[str]) -> Objects:
    objects = [one for text in texts for one in yaml.safe_load_all(text) if one]
    manifests = {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in objects}
    assert len(manifests) == len(objects)
    return manifests


def pods_of(objects: Objects) -> Any:
    (spec,) = (
        manifest["spec"]
        for (kind, _), manifest in objects.items()
        if kind in ("DaemonSet", "Deployment")
    )
    return spec


def config_of(values: dict[str, Any]) -> str:
    return str(rendered(values)["ConfigMap", "notbefore"]["data"]["notbefore.yml"])


def test_helm_lint_finds_no_fault_in_the_chart() -> None:
    result = helm_python.lint(CHART, EVERYTHING, strict=True)

    assert result["messages"] == []
    assert result["errors"] == []
    assert result["total_charts_linted"] == 1


@pytest.mark.parametrize(
    "values", [*ACCESS.values(), EVERYTHING, None], ids=[*ACCESS, "everything", "fleet"]
)
def test_manifests_are_valid_for_the_kubernetes_versions_of_aks(
    values: dict[str, Any] | None,
) -> None:
    objects = fleet() if values is None else rendered(values, name="other", namespace="elsewhere")
    for manifest in objects.values():
        if manifest["kind"] in CUSTOM:
            assert manifest["apiVersion"] in CUSTOM[manifest["kind"]]
            continue
        for version in KUBERNETES:
            kubernetes_validate.validate(manifest, version, strict=True)
    pod = pods_of(objects)["template"]["spec"]

    mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}

    assert {volume["name"] for volume in pod["volumes"]} == mounted


def test_chart_renders_every_value() -> None:
    manifests = rendered(EVERYTHING)
    pod = manifests["DaemonSet", "notbefore"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]

    assert container["image"] == "registry.example.org/notbefore@sha256:" + "0" * 64
    assert pod["spec"]["imagePullSecrets"] == [{"name": "pull"}]
    assert pod["spec"]["tolerations"] == [{"key": "spot", "operator": "Exists"}]
    assert pod["metadata"]["annotations"].items() >= {"a": "b"}.items()
    assert pod["metadata"]["labels"].items() >= {"team": "infra"}.items()
    assert container["env"] == EVERYTHING["env"]

    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}

    assert volumes["secrets"]["secret"]["secretName"] == "mine"
    assert manifests["Secret", "mine"]["stringData"] == {"slack-url": "https://hooks.example.org/x"}
    assert [source["secret"]["name"] for source in volumes["web"]["projected"]["sources"]] == [
        "notbefore-web",
        "own",
    ]

    monitor = manifests["PodMonitor", "notbefore"]

    assert monitor["metadata"]["namespace"] == "kube-system"
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["notbefore"]}
    assert monitor["spec"]["labelLimit"] == 63

    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["tlsConfig"]["ca"] == {
        "secret": {"name": "ama-metrics-mtls-secret", "key": "ca.pem"}
    }
    assert not [kind for kind, _ in manifests if kind in ("Certificate", "Issuer", "NetworkPolicy")]


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

    for version in KUBERNETES:
        kubernetes_validate.validate(objects["DaemonSet", "notbefore"], version, strict=True)


def test_agent_loads_the_configuration_of_the_chart(tmp_path: Path) -> None:
    (tmp_path / "slack-url").write_text("https://hooks.example.org/x\n", encoding="utf-8")
    file = tmp_path / "notbefore.yml"
    file.write_text(
        config_of(EVERYTHING).replace("/run/notbefore/", f"{tmp_path}/"), encoding="utf-8"
    )

    config = load(file, {}, {})

    assert list(config.sinks) == ["oncall"]
    assert config.server.listen == ":10169"
    assert config.log.format == "json"


def test_changed_configuration_replaces_the_pods() -> None:
    def checksum(values: dict[str, Any]) -> str:
        return str(
            pods_of(rendered(values))["template"]["metadata"]["annotations"]["checksum/config"]
        )

    assert checksum({}) == checksum({"podLabels": {"a": "b"}})
    assert checksum({}) != checksum({"config": {"log": {"level": "debug"}}})
    assert checksum({}) != checksum({"access": "open"})


def test_pods_tolerate_every_taint_and_avoid_virtual_nodes() -> None:
    pod = pods_of(rendered({}))["template"]["spec"]
    assert pod["tolerations"] == [{"operator": "Exists"}]

    (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    assert term["matchExpressions"] == [
        {"key": "type", "operator": "NotIn", "values": ["virtual-kubelet"]}
    ]


def test_agent_listens_only_on_the_node_by_default() -> None:
    servers = {
        name: yaml.safe_load(config_of(values)).get("server", {}) for name, values in ACCESS.items()
    }

    assert "listen" not in servers["node"]
    assert [name for name, server in servers.items() if server.get("insecure")] == ["open"]


@pytest.mark.parametrize(
    ("values", "mistake"),
    [
        ({"podMonitor": {"enabled": True}}, "set access to tls or open"),
        ({"config": {"server": {"listen": ":80"}}}, "`access` (node, tls or open) sets it"),
        ({"access": "all"}, "access"),
        ({"config": {"sinks": {"oncall": {"slack": {"url_fil": "x"}}}}}, "url_fil"),
        ({"config": {"sinks": {"oncall": {"slack": {"url": "https://x.example"}}}}}, "url"),
        ({"config": {"routes": [{"sinks": ["gone"]}]}}, "there is no sink gone"),
        ({"config": {"routes": [{"fallback": "gone"}]}}, "there is no sink gone"),
        ({"secrets": {"existingSecret": "a", "create": {"b": "c"}}}, "not both"),
        (
            {"config": {"sinks": {"a": {"pagerduty": {"routing_key": {"inline": "x"}}}}}},
            "routing_key",
        ),
    ],
)
def test_chart_refuses_values_that_cannot_work(values: dict[str, Any], mistake: str) -> None:
    with pytest.raises(helm_python.HelmError, match=re.escape(mistake)):
        rendered(values)


def test_chart_contains_the_rules_and_dashboards_of_the_project() -> None:
    manifests = rendered(EVERYTHING)
    rules = (CONFIG / "prometheus" / "notbefore.rules.yml").read_text(encoding="utf-8")

    assert manifests["PrometheusRule", "notbefore"]["spec"] == yaml.safe_load(rules)

    maps = [
        manifest
        for manifest in manifests.values()
        if manifest["metadata"].get("labels", {}).get("grafana_dashboard") == "1"
    ]
    held = {key: json.loads(text) for manifest in maps for key, text in manifest["data"].items()}
    boards = sorted((ROOT / "dashboards").glob("*.json"))

    assert held == {
        f"notbefore-{path.name}": json.loads(path.read_text(encoding="utf-8")) for path in boards
    }
    assert max(len(json.dumps(manifest)) for manifest in maps) < 1024 * 1024, (
        "a ConfigMap holds no more"
    )


def test_packaged_chart_contains_the_files_behind_its_links(tmp_path: Path) -> None:
    archive = helm_python.package(CHART, destination=tmp_path)

    with tarfile.open(archive) as tar:
        held = [member for member in tar if "/files/" in member.name]

    assert len(held) == len(list((CHART / "files").iterdir()))
    assert all(member.isreg() for member in held), "they are files there"


def test_pod_monitor_scrapes_a_pod_as_its_node_in_the_job_of_the_rules(tmp_path: Path) -> None:
    monitor = rendered(ACCESS["open"])["PodMonitor", "notbefore"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]

    def snake(key: str) -> str:
        return re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", key)

    relabelings = [
        {snake(key): value for key, value in relabeling.items()}
        for relabeling in endpoint["relabelings"]
    ]
    (labels,) = relabeled(relabelings, tmp_path, {"__meta_kubernetes_pod_node_name": "aks-1"})

    assert labels["job"] == "notbefore"
    assert labels["instance"] == "aks-1"


@pytest.mark.parametrize("access", ["node", "tls"])
def test_probes_and_prometheus_reach_the_agent_of_the_chart(access: str, tmp_path: Path) -> None:
    """The chart's own configuration and probes, with another port, and the pod's paths below a
    directory of ours.
    """
    port = free_port()
    web = tmp_path / "run" / "notbefore-web"
    chart = rendered(ACCESS[access])
    text = chart["ConfigMap", "notbefore"]["data"]["notbefore.yml"]
    text = text.replace("/run/notbefore-web", str(web)).replace(":10169", f":{port}")
    config = tmp_path / "notbefore.yml"
    values = yaml.safe_load(text) or {}
    # not the usual one: others may have it
    values.setdefault("server", {}).setdefault("listen", f"127.0.0.1:{port}")
    config.write_text(yaml.safe_dump(values), encoding="utf-8")
    web.mkdir(parents=True)
    secrets = yaml.safe_load_all(
        (CONFIG / "kubernetes/secret.example.yaml").read_text(encoding="utf-8")
    )
    example = next(one for one in secrets if one["metadata"]["name"] == "notbefore-web")[
        "stringData"
    ]["web.yml"]
    hashed = bcrypt.hashpw(b"hunter2", bcrypt.gensalt(4)).decode()
    (web / "web.yml").write_text(re.sub(r"\$2b\$\S+", hashed, example), encoding="utf-8")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.crt")
    certificate = authority.issue_cert("notbefore.notbefore.svc")
    certificate.private_key_pem.write_to_path(web / "tls.key")
    certificate.cert_chain_pems[0].write_to_path(web / "tls.crt")

    pod = chart["DaemonSet", "notbefore"]["spec"]["template"]["spec"]["containers"][0]
    probes = [
        pod[f"{name}Probe"]["exec"]["command"] for name in ("startup", "liveness", "readiness")
    ]

    def asked(command: list[str]) -> int:
        words: list[str | Path] = [BIN / command[0], *command[1:-1], config]
        assert command[-1] == "/etc/notbefore/notbefore.yml"
        return run(*words).returncode

    with Simulator() as imds:
        order = [
            "run",
            str(config),
            "--imds",
            imds.endpoint,
            "--state-dir",
            str(tmp_path / "state"),
        ]
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


@pytest.mark.parametrize("name", ["notbefore", "notbefore-fleet"])
def test_pods_run_without_privileges_and_match_their_selectors(name: str) -> None:
    objects = rendered(ACCESS["open"]) if name == "notbefore" else fleet()
    pods = pods_of(objects)
    pod = pods["template"]["spec"]
    (container,) = pods["template"]["spec"]["containers"]

    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }

    user = "USER {runAsUser}:{runAsGroup}\n".format(**pod["securityContext"])
    recipe = (ROOT / "Dockerfile").read_text(encoding="utf-8")

    assert user in recipe
    assert 'CMD ["notbefore", "health"]' in recipe
    assert pod["securityContext"]["runAsNonRoot"]
    assert not pod["automountServiceAccountToken"]

    to_hand_over = HAND_OVER_PATIENCE if name == "notbefore-fleet" else 0
    assert pod["terminationGracePeriodSeconds"] > to_hand_over + STOP_SECONDS + 5

    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted["state"] == str(default_state_dir())

    labels = pods["selector"]["matchLabels"]
    assert labels.items() <= pods["template"]["metadata"]["labels"].items()

    monitor = objects["PodMonitor", name]["spec"]
    policy = objects["NetworkPolicy", name]["spec"]

    assert monitor["selector"]["matchLabels"] == policy["podSelector"]["matchLabels"] == labels

    port = container["ports"][0]
    ports = [monitor["podMetricsEndpoints"][0]["port"], policy["ingress"][0]["ports"][0]["port"]]

    assert ports == [port["name"], port["name"]]

    config = yaml.safe_load(objects["ConfigMap", name]["data"]["notbefore.yml"])
    assert config["server"]["listen"] == f":{port['containerPort']}"


def test_fleet_manifests_share_snapshots_and_pass_the_restricted_policy() -> None:
    manifests = fleet()
    name = "notbefore-fleet"
    pods = manifests["Deployment", name]["spec"]
    (container,) = pods["template"]["spec"]["containers"]

    assert (
        manifests["Namespace", name]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
        == "restricted"
    )
    assert manifests["PodDisruptionBudget", name]["spec"]["selector"] == pods["selector"]
    assert (
        pods["template"]["spec"]["serviceAccountName"]
        == manifests["ServiceAccount", name]["metadata"]["name"]
    )

    probed = {
        container[f"{probe}Probe"]["httpGet"]["port"]
        for probe in ("startup", "liveness", "readiness")
    }
    assert probed == {container["ports"][0]["name"]}
    assert yaml.safe_load(manifests["ConfigMap", name]["data"]["notbefore.yml"])["fleet"][
        "checkpoints"
    ]

    typed = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    assert set(re.findall(r"kubectl -n (\S+)", typed)) == {"notbefore", name}
    assert set(re.findall(r"exec POD -- (\S+)", typed)) == {"notbefore"}, (
        "there is little else in the image"
    )

    applied = re.findall(r"apply -f (config/\S+)", typed)
    assert applied
    assert all((ROOT / place).is_file() for place in applied)
