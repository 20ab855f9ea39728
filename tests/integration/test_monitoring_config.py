"""The examples for Prometheus and Alertmanager, as these programs read them."""

import json
import re
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from support.agent import run
from support.chart import ACCESS, rendered
from support.needs import needs

CONFIG: Final = Path(__file__).parents[2] / "config"
ALERTMANAGER: Final = CONFIG / "alertmanager/alertmanager.yml"


def check(program: str, *words: str | Path) -> str:
    needs(program)
    done = run(program, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_takes_the_example_with_its_rules_and_targets() -> None:
    said = check("promtool", "check", "config", "--lint=all", "--lint-fatal", CONFIG / "prometheus/prometheus.yml")
    rules = yaml.safe_load((CONFIG / "prometheus/notbefore.rules.yml").read_text(encoding="utf-8"))
    assert f"SUCCESS: {sum(len(group['rules']) for group in rules['groups'])} rules found" in said
    (targets,) = (CONFIG / "prometheus/targets").glob("*.yml")  # a file that is not found is no error to promtool
    assert yaml.safe_load(targets.read_text(encoding="utf-8"))[0]["targets"]


def relabeled(relabelings: list[dict[str, Any]], directory: Path, *found: dict[str, str]) -> list[dict[str, str]]:
    """The labels of targets that were discovered with ``found``; Debian's Prometheus has no Kubernetes to ask."""
    job = {
        "job_name": "some job",
        "static_configs": [{"targets": [f"10.0.0.{n}:10169"], "labels": labels} for n, labels in enumerate(found)],
        "relabel_configs": relabelings,
    }
    file = directory / "prometheus.yml"
    file.write_text(yaml.safe_dump({"scrape_configs": [job]}), encoding="utf-8")
    targets = json.loads(check("promtool", "check", "service-discovery", "--timeout=1s", file, "some job"))
    return [
        target["labels"] or {} for target in sorted(targets, key=lambda one: one["discoveredLabels"]["__address__"])
    ]


def test_a_pod_is_scraped_as_its_node_in_the_job_that_the_rules_know(tmp_path: Path) -> None:
    monitor = rendered(ACCESS["open"])["PodMonitor", "notbefore"]
    assert (monitor["apiVersion"], monitor["kind"]) == ("monitoring.coreos.com/v1", "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]

    def snake(key: str) -> str:
        return re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", key)

    relabelings = [{snake(key): value for key, value in one.items()} for one in endpoint["relabelings"]]
    (labels,) = relabeled(relabelings, tmp_path, {"__meta_kubernetes_pod_node_name": "aks-1"})
    assert (labels["job"], labels["instance"]) == ("notbefore", "aks-1")


def test_of_azures_vms_those_with_the_tag_are_scraped_by_name(tmp_path: Path) -> None:
    config = yaml.safe_load((CONFIG / "prometheus/prometheus.yml").read_text(encoding="utf-8"))
    (job,) = config["scrape_configs"]
    name, tag = "__meta_azure_machine_name", "__meta_azure_machine_tag_notbefore"
    targets = relabeled(
        job["relabel_configs"], tmp_path, {name: "web_0", tag: "yes"}, {name: "web_1", tag: "no"}, {name: "web_2"}, {}
    )
    assert [labels.get("instance") for labels in targets] == ["web_0", None, None, "10.0.0.3:10169"]


def test_alertmanager_takes_the_example() -> None:
    check("amtool", "check-config", ALERTMANAGER)


@pytest.mark.parametrize(
    ("labels", "receivers"),
    [
        ("alertname=AzureScheduledEvent event_id=E severity=critical", "oncall,chat"),
        ("alertname=AzureScheduledEvent event_id=E severity=warning", "chat"),
        ("alertname=AzureScheduledEvent event_id=E severity=info", "chat"),
        ("alertname=AzureScheduledEvent event_id=E severity=critical exercise=true", "chat"),
        ("alertname=AzureScheduledEventStartedWithoutNotice severity=critical", "oncall,chat"),
        ("alertname=NotbeforeNoAgents severity=critical", "oncall,chat"),
        ("alertname=NotbeforeImdsDown severity=warning", "chat"),
    ],
)
def test_alerts_reach_whom_they_concern(labels: str, receivers: str) -> None:
    words = ("amtool", "config", "routes", "test", f"--config.file={ALERTMANAGER}", f"--verify.receivers={receivers}")
    check(*words, *labels.split())
