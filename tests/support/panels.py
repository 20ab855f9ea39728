"""What the panels of a dashboard find in a Prometheus, as Grafana would ask for it."""

import math
import re
import time
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


def series(
    prometheus: Prometheus, target: dict[str, Any], variables: dict[str, str]
) -> list[dict[str, Any]]:
    """The series that a target finds, as Grafana would ask for them: their labels and values."""
    expr = resolved(target["expr"], variables)
    now = time.time()
    if target.get("instant"):
        found = prometheus.ask("query", query=expr, time=now)["result"]
        return [{"labels": one["metric"], "values": [float(one["value"][1])]} for one in found]
    found = prometheus.ask("query_range", query=expr, start=now - HOURS * 3600, end=now, step=60)[
        "result"
    ]
    return [
        {"labels": one["metric"], "values": [float(value) for _, value in one["values"]]}
        for one in found
    ]


def _without(labels: list[str], found: list[dict[str, Any]]) -> list[str]:
    """Those of the labels that a series does not have."""
    return [label for label in labels if not all(one["labels"].get(label) for one in found)]


def faults(prometheus: Prometheus, board: dict[str, Any], variables: dict[str, str]) -> list[str]:
    """Queries that find nothing, labels that no series has, and columns of tables that are neither
    label nor value.
    """
    found: list[str] = []
    for panel in board["panels"]:
        answers = {
            target["refId"]: series(prometheus, target, variables) for target in panel["targets"]
        }
        for target in panel["targets"]:
            answer = answers[target["refId"]]
            where = f"{panel['title']}, {target['refId']}"
            if not any(not math.isnan(value) for one in answer for value in one["values"]):
                found.append(f"{where}: nothing")
            legend = re.findall(r"{{(\w+)}}", target.get("legendFormat", ""))
            found += [f"{where}: no label {label}" for label in _without(legend, answer)]
        if panel["type"] == "table":
            labels = {
                label for answer in answers.values() for one in answer for label in one["labels"]
            }
            values = {"Value"} if len(answers) == 1 else {f"Value #{ref}" for ref in answers}
            renamed = panel["transformations"][-1]["options"]["renameByName"]
            titles = {
                override["matcher"]["options"] for override in panel["fieldConfig"]["overrides"]
            }
            odd = (set(renamed) - labels - values) | (titles - set(renamed.values()))
            found += [f"{panel['title']}: no column {name}" for name in odd]
    for annotation in board["annotations"]["list"]:
        answer = series(prometheus, annotation["target"], variables)
        said = re.findall(r"{{(\w+)}}", annotation["titleFormat"] + annotation["textFormat"])
        found += [f"{annotation['name']}: nothing"] * (not answer)
        said += annotation["tagKeys"].split(",")
        found += [f"{annotation['name']}: no label {label}" for label in _without(said, answer)]
    return found
