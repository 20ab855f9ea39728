"""Queries of dashboards, asked of a Prometheus as Grafana asks them."""

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
    """Replace variables of Grafana and of the dashboard by their values."""
    values = {**GRAFANAS, **variables}
    return re.sub(r"\$([a-z_]\w*)", lambda match: values[match[1]], text)


def series(
    prometheus: Prometheus, target: dict[str, Any], variables: dict[str, str]
) -> list[dict[str, Any]]:
    """Return labels and values of the series that a query finds."""
    expr = resolved(target["expr"], variables)
    now = time.time()
    if target.get("instant"):
        answer = prometheus.ask("query", query=expr, time=now)
        return [
            {"labels": row["metric"], "values": [float(row["value"][1])]}
            for row in answer["result"]
        ]
    answer = prometheus.ask("query_range", query=expr, start=now - HOURS * 3600, end=now, step=60)
    return [
        {"labels": row["metric"], "values": [float(value) for _, value in row["values"]]}
        for row in answer["result"]
    ]


def _without(labels: list[str], rows: list[dict[str, Any]]) -> list[str]:
    """Return the labels that a series does not have."""
    return [label for label in labels if not all(row["labels"].get(label) for row in rows)]


def faults(prometheus: Prometheus, board: dict[str, Any], variables: dict[str, str]) -> list[str]:
    """Return what is wrong with the queries of a dashboard.

    They are queries that find nothing, labels that a series does not have, and columns of tables
    that are neither label nor value.
    """
    wrong: list[str] = []
    for panel in board["panels"]:
        answers = {
            target["refId"]: series(prometheus, target, variables) for target in panel["targets"]
        }
        for target in panel["targets"]:
            rows = answers[target["refId"]]
            place = f"{panel['title']}, {target['refId']}"
            if not _has_value(rows):
                wrong.append(f"{place}: nothing")
            legend = re.findall(r"{{(\w+)}}", target.get("legendFormat", ""))
            wrong += [f"{place}: no label {label}" for label in _without(legend, rows)]
        if panel["type"] == "table":
            wrong += [
                f"{panel['title']}: no column {name}" for name in _odd_columns(panel, answers)
            ]
    for annotation in board["annotations"]["list"]:
        name = annotation["name"]
        rows = series(prometheus, annotation["target"], variables)
        if not rows:
            wrong.append(f"{name}: nothing")
        labels = re.findall(r"{{(\w+)}}", annotation["titleFormat"] + annotation["textFormat"])
        labels += annotation["tagKeys"].split(",")
        wrong += [f"{name}: no label {label}" for label in _without(labels, rows)]
    return wrong


def _has_value(rows: list[dict[str, Any]]) -> bool:
    values: list[float] = []
    for row in rows:
        values += row["values"]
    return not all(math.isnan(value) for value in values)


def _odd_columns(panel: dict[str, Any], answers: dict[str, list[dict[str, Any]]]) -> set[str]:
    """Return columns that are neither label nor value, and formats of columns that do not exist."""
    columns = {f"Value #{ref}" for ref in answers}
    if len(answers) == 1:
        columns = {"Value"}
    for rows in answers.values():
        for row in rows:
            columns.update(row["labels"])
    renamed = panel["transformations"][-1]["options"]["renameByName"]
    formatted = {override["matcher"]["options"] for override in panel["fieldConfig"]["overrides"]}
    return (set(renamed) - columns) | (formatted - set(renamed.values()))
