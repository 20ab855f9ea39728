"""Every query of the dashboards, asked of a real Prometheus that has scraped real agents."""

import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from notbefore.events import samples
from support.fleet import LIVE, watched_fleet
from support.scraping import Prometheus, needs_prometheus

DASHBOARDS = Path(__file__).parents[2] / "dashboards"
HOURS = 2.0
AWAITED = "azure_scheduled_event_approvals_total"  # no agent tells it yet: nothing can be found of it
EVERYTHING = {"region": ".*", "group": ".*", "scale_set": ".*", "vm": ".*"}
ONE = {"region": "westeurope", "group": "fleet", "scale_set": "WestNO", "vm": LIVE[0]}
CHOSEN = {"fleet": EVERYTHING, "notbefore": EVERYTHING, "vm": ONE}
GRAFANAS = {"__range": f"{HOURS:g}h", "__rate_interval": "4m", "__interval": "1m"}

pytestmark = needs_prometheus


def loaded(name: str) -> dict[str, Any]:
    dashboard: dict[str, Any] = json.loads((DASHBOARDS / f"{name}.json").read_bytes())
    return dashboard


def targets() -> list[Any]:
    return [
        pytest.param(name, target, id=f"{name}-{panel['title']}-{target['refId']}")
        for name in CHOSEN
        for panel in loaded(name)["panels"]
        for target in panel["targets"]
    ]


def annotations() -> list[Any]:
    return [
        pytest.param(name, annotation, id=f"{name}-{annotation['name']}")
        for name in CHOSEN
        for annotation in loaded(name)["annotations"]["list"]
    ]


def resolved(text: str, variables: dict[str, str]) -> str:
    return re.sub(r"\$([a-z_]\w*)", lambda match: {**GRAFANAS, **variables}[match[1]], text)


def series(prometheus: Prometheus, target: dict[str, Any], variables: dict[str, str]) -> list[dict[str, Any]]:
    """The series that a target finds, as Grafana would ask for them: their labels and values."""
    expr, now = resolved(target["expr"], variables), time.time()
    if target.get("instant"):
        found = prometheus.ask("query", query=expr, time=now)["result"]
        return [{"labels": one["metric"], "values": [float(one["value"][1])]} for one in found]
    found = prometheus.ask("query_range", query=expr, start=now - HOURS * 3600, end=now, step=60)["result"]
    return [{"labels": one["metric"], "values": [float(value) for _, value in one["values"]]} for one in found]


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with watched_fleet(tmp_path_factory.mktemp("fleet"), hours=HOURS) as found:
        yield found


@pytest.mark.parametrize(("name", "target"), targets())
def test_every_query_finds_something_and_every_label_of_a_legend(
    prometheus: Prometheus, name: str, target: dict[str, Any]
) -> None:
    found = series(prometheus, target, CHOSEN[name])
    if AWAITED in target["expr"]:
        assert not found
        return
    assert any(not math.isnan(value) for one in found for value in one["values"])
    for label in re.findall(r"{{(\w+)}}", target.get("legendFormat", "")):
        assert all(one["labels"].get(label) for one in found), label


def test_nothing_is_awaited_any_more_once_it_is_there() -> None:
    known = {f"{metric.name}_total" for metric in vars(samples).values() if isinstance(metric, samples.Metric)}
    assert AWAITED not in known, "agents tell it now: let the test above look for it, and play an approval"


@pytest.mark.parametrize(
    ("name", "panel"),
    [
        pytest.param(name, panel, id=f"{name}-{panel['title']}")
        for name in CHOSEN
        for panel in loaded(name)["panels"]
        if panel["type"] == "table"
    ],
)
def test_every_column_of_a_table_is_a_label_or_the_value_of_a_query(
    prometheus: Prometheus, name: str, panel: dict[str, Any]
) -> None:
    answers = {target["refId"]: series(prometheus, target, CHOSEN[name]) for target in panel["targets"]}
    labels = {label for found in answers.values() for one in found for label in one["labels"]}
    values = {"Value"} if len(answers) == 1 else {f"Value #{ref}" for ref in answers}
    (organized,) = (t["options"] for t in panel["transformations"] if t["id"] == "organize")
    assert set(organized["renameByName"]) <= labels | values
    titles = {override["matcher"]["options"] for override in panel["fieldConfig"]["overrides"]}
    assert titles <= set(organized["renameByName"].values())


@pytest.mark.parametrize(("name", "annotation"), annotations())
def test_the_annotations_find_events_with_what_they_say_of_them(
    prometheus: Prometheus, name: str, annotation: dict[str, Any]
) -> None:
    found = series(prometheus, annotation["target"], CHOSEN[name])
    assert found
    said = re.findall(r"{{(\w+)}}", annotation["titleFormat"] + annotation["textFormat"])
    for label in (*said, *annotation["tagKeys"].split(",")):
        assert all(one["labels"].get(label) for one in found), label


@pytest.mark.parametrize("name", CHOSEN)
def test_each_variable_has_values_and_they_narrow_down_the_next(prometheus: Prometheus, name: str) -> None:
    chosen: dict[str, str] = {}
    for variable in loaded(name)["templating"]["list"]:
        if variable["type"] == "datasource":
            continue
        match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
        assert match
        selector, since = resolved(match[1], chosen), str(time.time() - HOURS * 3600)
        values = prometheus.ask(f"label/{match[2]}/values", **{"match[]": selector, "start": since})
        assert ONE[variable["name"]] in values
        assert "EastUS_0" not in values or not chosen
        chosen[variable["name"]] = ONE[variable["name"]]


@pytest.mark.parametrize("target", [pytest.param(target.values[1], id=target.id) for target in targets()])
def test_what_is_chosen_is_all_that_is_shown(prometheus: Prometheus, target: dict[str, Any]) -> None:
    for one in series(prometheus, target, ONE):
        labels = one["labels"]
        assert labels.get("name", LIVE[0]) == LIVE[0]
        assert not labels.get("event_id", "").startswith(("EASTUS", "DB-"))


def test_events_are_counted_once_however_many_vms_report_them(prometheus: Prometheus) -> None:
    live = 'azure_scheduled_event_info{instance=~"127.+"}'
    assert prometheus.value(f"count({live})") == 2 * 3
    (panel,) = (panel for panel in loaded("fleet")["panels"] if panel["title"] == "Events listed now")
    (shown,) = series(prometheus, panel["targets"][0], {**EVERYTHING, "vm": "|".join(LIVE)})
    assert shown["values"] == [3.0]


def test_a_scale_set_counts_once_in_the_heatmap_of_notices(prometheus: Prometheus) -> None:
    (panel,) = (panel for panel in loaded("fleet")["panels"] if panel["type"] == "heatmap")

    def told(vm: str) -> float:
        found = series(prometheus, panel["targets"][0], {**EVERYTHING, "vm": vm})
        (everything,) = (one["values"] for one in found if one["labels"]["le"] == "+Inf")
        return max(everything)

    assert told("EastUS_.*") == pytest.approx(told("EastUS_0"))
    assert told("EastUS_0") > 1  # increase() extrapolates: one event in four minutes, seen from the samples of three


@pytest.mark.parametrize(
    ("name", "title", "number"),
    [
        ("fleet", "Silent or failing agents", 5),  # EastUS_2 fails in two ways
        ("notbefore", "Agents", 6),
        ("notbefore", "Versions", 1),
        ("notbefore", "Not polling", 1),
        ("notbefore", "State not written", 1),
        ("notbefore", "Damaged state files", 0),
        ("notbefore", "Failed reloads", 0),
    ],
)
def test_the_numbers_are_those_of_the_fleet(prometheus: Prometheus, name: str, title: str, number: int) -> None:
    (panel,) = (panel for panel in loaded(name)["panels"] if panel["title"] == title and panel["type"] == "stat")
    (shown,) = series(prometheus, panel["targets"][0], EVERYTHING)
    assert shown["values"] == [number]


def test_each_way_of_failing_is_shown(prometheus: Prometheus) -> None:
    (panel,) = (
        panel
        for panel in loaded("fleet")["panels"]
        if panel["title"] == "Silent or failing agents" and panel["type"] == "table"
    )
    found = {one["labels"]["problem"] for one in series(prometheus, panel["targets"][0], EVERYTHING)}
    assert found == {
        "cannot be scraped",
        "gone from the scrape",
        "IMDS does not answer",
        "state cannot be written",
        "never polled",
    }
