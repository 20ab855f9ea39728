"""The Helm chart, rendered by Helm's own library: valid in every Kubernetes that AKS offers."""

import json
import tarfile
from pathlib import Path
from typing import Any, Final

import helm_python
import kubernetes_validate
import pytest
import yaml

from integration.test_deployment import ROOT
from notbefore.config.load import load
from support.chart import ACCESS, CHART, rendered

# AKS offers the newest three versions, and older ones with long-term support: what the oldest has not yet and the
# newest no longer, either of these two says
KUBERNETES: Final = ("1.29.0", kubernetes_validate.latest_version())
CUSTOM: Final = {  # not Kubernetes' own
    "PodMonitor": ("monitoring.coreos.com/v1", "azmonitoring.coreos.com/v1"),
    "PrometheusRule": ("monitoring.coreos.com/v1",),
    "Certificate": ("cert-manager.io/v1",),
    "Issuer": ("cert-manager.io/v1",),
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
    "tls": {"certManager": False, "certificate": "own", "ca": {"name": "ama-metrics-mtls-secret", "key": "ca.pem"}},
    "podMonitor": {"enabled": True, "apiVersion": "azmonitoring.coreos.com/v1", "namespace": "kube-system"},
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
    "dashboards": {"enabled": True, "annotations": {"grafana_folder": "Azure"}},
    "networkPolicy": {"enabled": False},
    "tolerations": [{"key": "spot", "operator": "Exists"}],
    "podAnnotations": {"a": "b"},
    "podLabels": {"team": "infra"},
    "env": [{"name": "OTEL_RESOURCE_ATTRIBUTES", "value": "a=b"}],
}


def test_helm_lint_has_nothing_to_say() -> None:
    said = helm_python.lint(CHART, EVERYTHING, strict=True)
    assert (said["messages"], said["errors"], said["total_charts_linted"]) == ([], [], 1)


@pytest.mark.parametrize("values", [*ACCESS.values(), EVERYTHING], ids=[*ACCESS, "everything"])
def test_every_kubernetes_that_aks_offers_takes_it(values: dict[str, Any]) -> None:
    for one in rendered(values, name="other", namespace="elsewhere").values():
        if one["kind"] in CUSTOM:
            assert one["apiVersion"] in CUSTOM[one["kind"]]
            continue
        for version in KUBERNETES:
            kubernetes_validate.validate(one, version, strict=True)


def test_every_value_arrives() -> None:
    found = rendered(EVERYTHING)
    pod = found["DaemonSet", "notbefore"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert container["image"] == "registry.example.org/notbefore@sha256:" + "0" * 64
    assert pod["spec"]["imagePullSecrets"] == [{"name": "pull"}]
    assert pod["spec"]["tolerations"] == [{"key": "spot", "operator": "Exists"}]
    assert pod["metadata"]["annotations"].items() >= {"a": "b"}.items()
    assert pod["metadata"]["labels"].items() >= {"team": "infra"}.items()
    assert container["env"] == EVERYTHING["env"]
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert volumes["secrets"]["secret"]["secretName"] == "mine"
    assert found["Secret", "mine"]["stringData"] == {"slack-url": "https://hooks.example.org/x"}
    assert [one["secret"]["name"] for one in volumes["web"]["projected"]["sources"]] == ["notbefore-web", "own"]
    monitor = found["PodMonitor", "notbefore"]
    assert monitor["metadata"]["namespace"] == "kube-system"
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["notbefore"]}
    assert monitor["spec"]["labelLimit"] == 63
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["tlsConfig"]["ca"] == {"secret": {"name": "ama-metrics-mtls-secret", "key": "ca.pem"}}
    assert not [kind for kind, _ in found if kind in ("Certificate", "Issuer", "NetworkPolicy")]


def test_the_agent_takes_the_configuration_that_the_chart_makes(tmp_path: Path) -> None:
    written = rendered(EVERYTHING)["ConfigMap", "notbefore"]["data"]["notbefore.yml"]
    (tmp_path / "slack-url").write_text("https://hooks.example.org/x\n", encoding="utf-8")
    file = tmp_path / "notbefore.yml"
    file.write_text(written.replace("/run/notbefore/", f"{tmp_path}/"), encoding="utf-8")
    config = load(file, {}, {})
    assert (list(config.sinks), config.server.listen, config.log.format) == (["oncall"], ":10169", "json")


def test_another_configuration_replaces_the_pods() -> None:
    def checksum(values: dict[str, Any]) -> str:
        pod = rendered(values)["DaemonSet", "notbefore"]["spec"]["template"]
        return str(pod["metadata"]["annotations"]["checksum/config"])

    assert checksum({}) == checksum({"podLabels": {"a": "b"}})
    assert checksum({}) != checksum({"config": {"log": {"level": "debug"}}})
    assert checksum({}) != checksum({"access": "open"})


def test_no_pod_is_put_on_a_virtual_node_though_every_taint_is_tolerated() -> None:
    pod = rendered({})["DaemonSet", "notbefore"]["spec"]["template"]["spec"]
    assert pod["tolerations"] == [{"operator": "Exists"}]
    (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"] == [{"key": "type", "operator": "NotIn", "values": ["virtual-kubelet"]}]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"podMonitor": {"enabled": True}}, "set access to tls or open"),
        ({"config": {"server": {"listen": ":80"}}}, "`access` (node, tls or open) sets it"),
        ({"access": "all"}, "access"),
        ({"config": {"sinks": {"oncall": {"slack": {"url_fil": "x"}}}}}, "url_fil"),
        ({"config": {"imds": {"interval": "1 min"}}}, "interval"),
    ],
)
def test_values_that_cannot_work_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(helm_python.HelmError, match=said.replace("(", r"\(").replace(")", r"\)")):
        rendered(values)


def test_the_rules_of_prometheus_are_the_operators() -> None:
    spec = rendered(EVERYTHING)["PrometheusRule", "notbefore"]["spec"]
    rules = ROOT / "config" / "prometheus" / "notbefore.rules.yml"
    assert spec == yaml.safe_load(rules.read_text(encoding="utf-8"))


def test_each_dashboard_is_a_configmap_that_grafanas_sidecar_finds() -> None:
    found = [
        one
        for (kind, name), one in rendered(EVERYTHING).items()
        if kind == "ConfigMap" and "dashboard" in name and one["metadata"]["labels"]["grafana_dashboard"] == "1"
    ]
    held = {key: json.loads(text) for one in found for key, text in one["data"].items()}
    boards = sorted((ROOT / "dashboards").glob("*.json"))
    assert held == {f"notbefore-{path.name}": json.loads(path.read_text(encoding="utf-8")) for path in boards}
    assert max(len(json.dumps(one)) for one in found) < 1024 * 1024, "a ConfigMap holds no more"


def test_a_packaged_chart_holds_the_files_behind_the_links(tmp_path: Path) -> None:
    archive = helm_python.package(CHART, destination=tmp_path)
    with tarfile.open(archive) as tar:
        held = [member for member in tar if "/files/" in member.name]
    assert len(held) == len(list((CHART / "files").iterdir()))
    assert all(member.isreg() for member in held), "they are files there"
