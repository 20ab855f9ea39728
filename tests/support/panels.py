"""What the panels of a dashboard find in a Prometheus, as Grafana would ask for it."""

import math
import re
import time
from collections.abc import Iterator
from typing import Any

from support.scraping import Prometheus

HOURS = 2.0  # the time range
GRAFANAS = {
    "__range": f"{HOURS:g}h",
    "__range_s": f"{HOURS * 3600:.0f}",
    "__rate_interval": "4m",
    "__rate_interval_ms": "240000",
}


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


def without(labels: list[str], found: list[dict[str, Any]]) -> list[str]:
    """Those of the labels that a series does not have."""
    return [label for label in labels if not all(one["labels"].get(label) for one in found)]


def faults(prometheus: Prometheus, panel: dict[str, Any], variables: dict[str, str]) -> Iterator[str]:
    """Queries of a panel that find nothing, and labels of their legends that no series has."""
    for target in panel["targets"]:
        found = series(prometheus, target, variables)
        where = f"{panel['title']}, {target['refId']}"
        if not any(not math.isnan(value) for one in found for value in one["values"]):
            yield f"{where}: nothing"
        legend = re.findall(r"{{(\w+)}}", target.get("legendFormat", ""))
        yield from (f"{where}: no label {label}" for label in without(legend, found))


def organized(prometheus: Prometheus, panel: dict[str, Any], variables: dict[str, str]) -> tuple[set[str], set[str]]:
    """The fields that a table shows, and those that its queries find."""
    answers = {target["refId"]: series(prometheus, target, variables) for target in panel["targets"]}
    labels = {label for found in answers.values() for one in found for label in one["labels"]}
    values = {"Value"} if len(answers) == 1 else {f"Value #{ref}" for ref in answers}
    options = panel["transformations"][-1]["options"]
    titles = {override["matcher"]["options"] for override in panel["fieldConfig"]["overrides"]}
    assert titles <= set(options["renameByName"].values()), panel["title"]
    return set(options["renameByName"]), labels | values
