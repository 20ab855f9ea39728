"""Runs the queries of dashboards on a Prometheus as Grafana does."""

import math
import re
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from support.scraping import Prometheus

LABEL = r"{{(\w+)}}"  # in a format of Grafana
HOURS = 2.0  # the time range
VARIABLES_OF_GRAFANA = {
    "__range": f"{HOURS:g}h",
    "__range_s": f"{HOURS * 3600:.0f}",
    "__rate_interval": "4m",
    "__rate_interval_ms": "240000",
}


def resolved(text: str, variables: dict[str, str]) -> str:
    """Replace variables of Grafana and of the dashboard by their values."""
    values = {**VARIABLES_OF_GRAFANA, **variables}

    def value_of(match: re.Match[str]) -> str:
        return values[match[1]]

    return re.sub(r"\$([a-z_]\w*)", value_of, text)


class Series(NamedTuple):
    """One series of the result of a query."""

    labels: dict[str, str]
    values: list[float]


def series(
    prometheus: Prometheus, target: dict[str, Any], variables: dict[str, str]
) -> list[Series]:
    """Run a query over the time range, or only now if it is an instant query."""
    expr = resolved(target["expr"], variables)
    now = time.time()
    if target.get("instant"):
        answer = prometheus.ask("query", query=expr, time=now)
        return [Series(row["metric"], _floats([row["value"]])) for row in answer["result"]]
    start = now - HOURS * 3600
    answer = prometheus.ask("query_range", query=expr, start=start, end=now, step=60)
    return [Series(row["metric"], _floats(row["values"])) for row in answer["result"]]


def _floats(pairs: list[tuple[float, str]]) -> list[float]:
    """Return the values of pairs of a time and a value."""
    return [float(value) for _, value in pairs]


def _missing(labels: list[str], rows: list[Series]) -> list[str]:
    """Return the labels that not all series have."""
    return [label for label in labels if not all(row.labels.get(label) for row in rows)]


def faults(prometheus: Prometheus, board: dict[str, Any], variables: dict[str, str]) -> list[str]:
    """Return the faults of a dashboard's queries.

    Faults are queries without a result, labels that a series lacks, and columns of tables that are
    neither label nor value.
    """
    texts: list[str] = []
    for panel in board["panels"]:
        texts += _faults_of_panel(prometheus, panel, variables)
    for annotation in board["annotations"]["list"]:
        texts += _faults_of_annotation(prometheus, annotation, variables)
    return texts


def _faults_of_panel(
    prometheus: Prometheus, panel: dict[str, Any], variables: dict[str, str]
) -> Iterator[str]:
    results: dict[str, list[Series]] = {}
    for target in panel["targets"]:
        rows = series(prometheus, target, variables)
        results[target["refId"]] = rows
        query = f"{panel['title']}, {target['refId']}"
        if not _has_value(rows):
            yield f"{query}: nothing"
        legend = re.findall(LABEL, target.get("legendFormat", ""))
        for label in _missing(legend, rows):
            yield f"{query}: no label {label}"
    if panel["type"] == "table":
        for name in _odd_columns(panel, results):
            yield f"{panel['title']}: no column {name}"


def _faults_of_annotation(
    prometheus: Prometheus, annotation: dict[str, Any], variables: dict[str, str]
) -> Iterator[str]:
    name = annotation["name"]
    rows = series(prometheus, annotation["target"], variables)
    if not rows:
        yield f"{name}: nothing"
    labels = re.findall(LABEL, annotation["titleFormat"] + annotation["textFormat"])
    labels += annotation["tagKeys"].split(",")
    for label in _missing(labels, rows):
        yield f"{name}: no label {label}"


def _has_value(rows: list[Series]) -> bool:
    values: list[float] = []
    for row in rows:
        values += row.values
    return not all(math.isnan(value) for value in values)


def _odd_columns(panel: dict[str, Any], results: dict[str, list[Series]]) -> set[str]:
    """Return columns that are neither label nor value, and formats of columns that do not exist."""
    columns = {f"Value #{ref}" for ref in results}
    if len(results) == 1:
        columns = {"Value"}
    for rows in results.values():
        for row in rows:
            columns.update(row.labels)
    renamed = panel["transformations"][-1]["options"]["renameByName"]
    formatted = {override["matcher"]["options"] for override in panel["fieldConfig"]["overrides"]}
    return (set(renamed) - columns) | (formatted - set(renamed.values()))
