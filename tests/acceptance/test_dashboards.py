"""A real Prometheus that scrapes real agents answers every query of the dashboards."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.agent import becomes, eventually
from support.fleet import EXPORTERS, LIVE, LOST, SILENT, STOPPED, watched_fleet
from support.needs import needs
from support.panels import HOURS, faults, resolved, series
from support.scraping import Prometheus

DASHBOARDS = Path(__file__).parents[2] / "dashboards"
EVERYTHING = {"region": ".*", "group": ".*", "scale_set": ".*", "vm": ".*"}
ONE = {"region": "westeurope", "group": "fleet", "scale_set": "WestNO", "vm": LIVE[0]}
CHOSEN = {"fleet": EVERYTHING, "notbefore": EVERYTHING, "vm": ONE}
BOARDS: dict[str, dict[str, Any]] = {
    name: json.loads((DASHBOARDS / f"{name}.json").read_bytes()) for name in CHOSEN
}
PANELS: list[tuple[str, dict[str, Any]]] = []  # with the name of the dashboard
for _name, _board in BOARDS.items():
    PANELS += [(_name, _panel) for _panel in _board["panels"]]


def target_of(name: str, title: str, kind: str, ref: str = "") -> dict[str, Any]:
    """Return the first query of a panel, or the one with the reference ``ref``."""
    (panel,) = (
        panel
        for panel in BOARDS[name]["panels"]
        if panel["title"] == title and panel["type"] == kind
    )
    targets: list[dict[str, Any]] = panel["targets"]
    if not ref:
        return targets[0]
    return next(target for target in targets if target["refId"] == ref)


def check(
    prometheus: Prometheus, chosen: dict[str, str], *expected: tuple[str, str, float]
) -> None:
    """Wait until the dashboards show these single numbers: (dashboard, panel, number)."""
    for name, title, number in expected:
        target = target_of(name, title, "stat")

        def numbers() -> list[Any]:
            return [title, *(row.values for row in series(prometheus, target, chosen))]

        becomes(numbers, [title, [number]])


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    needs("prometheus", "promtool")
    with watched_fleet(tmp_path_factory.mktemp("fleet"), hours=HOURS) as running:
        yield running


# Each look waits: an agent that answers a scrape late is missing in all queries until the next one.


def test_every_query_finds_series_with_the_labels_that_are_shown(
    prometheus: Prometheus,
) -> None:
    for name, board in BOARDS.items():
        becomes(lambda: faults(prometheus, board, CHOSEN[name]), [])


def test_variables_have_values_that_narrow_the_next(prometheus: Prometheus) -> None:
    for board in BOARDS.values():
        chosen: dict[str, str] = {}
        values: list[str] = []
        for variable in board["templating"]["list"][1:]:
            match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
            assert match
            selector = resolved(match[1], chosen)
            since = str(time.time() - HOURS * 3600)
            values = prometheus.ask(
                f"label/{match[2]}/values", **{"match[]": selector, "start": since}
            )
            assert ONE[variable["name"]] in values
            chosen[variable["name"]] = ONE[variable["name"]]
        assert all(vm.startswith("WestNO_") for vm in values)


def test_panels_show_only_the_chosen_vm(prometheus: Prometheus) -> None:
    for _, panel in PANELS:
        for target in panel["targets"]:
            for row in series(prometheus, target, ONE):
                labels = row.labels  # a sum, which the next test checks, has no name
                assert labels.get("name", LIVE[0]) == LIVE[0], panel["title"]
                event_id = labels.get("event_id", "")
                assert not event_id.startswith(("EASTUS", "DB-")), panel["title"]


def test_sums_are_empty_when_no_vm_is_chosen(prometheus: Prometheus) -> None:
    """Sums name no VM. They are 0 or nothing, except those that are not about the chosen VMs."""
    no_vm = {**EVERYTHING, "vm": "nobody"}
    exceptions = {
        ("fleet", "Silent or failing agents", "A"),  # agents that never said which VM they are on
        ("fleet", "Silent or failing agents", "age"),
        ("fleet", "Notice: promised and given", "promised"),  # the same for all VMs
    }

    def queries_with_values() -> set[tuple[str, str, str]]:
        queries: set[tuple[str, str, str]] = set()
        for name, panel in PANELS:
            for target in panel["targets"]:
                if any(any(row.values) for row in series(prometheus, target, no_vm)):
                    queries.add((name, panel["title"], target["refId"]))
        return queries

    becomes(queries_with_values, exceptions)
    for board in BOARDS.values():
        for annotation in board["annotations"]["list"]:
            assert series(prometheus, annotation["target"], no_vm) == []


def test_single_numbers_are_those_of_the_fleet(prometheus: Prometheus) -> None:
    check(prometheus, ONE, ("notbefore", "Agents", 1), ("fleet", "Silent or failing agents", 2))
    check(
        prometheus,
        EVERYTHING,
        ("fleet", "Silent or failing agents", 6),  # EastUS_2 fails in two ways, and counts once
        ("notbefore", "Agents", 6),
        ("notbefore", "Versions", 1),
        ("notbefore", "Not polling", 1),
        ("notbefore", "State not written", 1),
        ("notbefore", "Damaged state files", 0),
        ("notbefore", "Failed reloads", 0),
    )

    def failing() -> list[tuple[str, str | None]]:
        rows = series(
            prometheus, target_of("fleet", "Silent or failing agents", "table"), EVERYTHING
        )
        return sorted((row.labels["problem"], row.labels.get("name")) for row in rows)

    expected = [
        ("IMDS does not answer", "EastUS_2"),
        ("cannot be scraped", STOPPED),
        ("cannot be scraped", SILENT),  # for longer than the time range
        ("gone from the scrape", "EastUS_1"),
        ("never polled", None),
        ("never scraped", None),
        ("state cannot be written", "EastUS_2"),
    ]

    becomes(failing, expected)


def test_series_of_another_job_are_not_shown_as_the_agents(
    prometheus: Prometheus,
) -> None:
    (instance,) = (instance for instance, up in EXPORTERS.items() if up)
    eventually(lambda: prometheus.value(f'process_resident_memory_bytes{{instance="{instance}"}}'))

    def jobs() -> list[str]:
        rows = series(prometheus, target_of("notbefore", "Agents", "table", "memory"), EVERYTHING)
        return [row.labels["job"] for row in rows if row.labels["instance"] == instance]

    becomes(jobs, ["notbefore"])


def test_event_of_a_silent_vm_is_shown_while_others_see_it(
    prometheus: Prometheus,
) -> None:
    chosen = {**EVERYTHING, "vm": SILENT}
    check(
        prometheus,
        chosen,
        ("fleet", "VMs affected now", 1),
        ("fleet", "Events listed now", 1),
        ("fleet", "Started now", 1),
        ("vm", "Events that hit it", 1),
        ("vm", "Started now", 1),
    )
    # the VM itself reported the event as Scheduled
    lost = {
        "name": SILENT,
        "event_id": LOST,
        "event_status": "Started",
        "scope": "self",
    }
    for name, title in (("fleet", "Scheduled and started events"), ("vm", "Listed now")):
        target = target_of(name, title, "table")

        def lost_rows() -> list[dict[str, str | None]]:
            rows = series(prometheus, target, chosen)
            return [{label: row.labels.get(label) for label in lost} for row in rows]

        becomes(lost_rows, [lost])


def test_annotations_of_a_vm_are_its_own_events(prometheus: Prometheus) -> None:
    for annotation in BOARDS["vm"]["annotations"]["list"]:
        rows = eventually(
            lambda: series(prometheus, annotation["target"], {**EVERYTHING, "vm": "db-a"})
        )
        assert LOST not in {row.labels["event_id"] for row in rows}


def test_event_is_counted_once_when_several_vms_report_it(prometheus: Prometheus) -> None:
    events = 'count(azure_scheduled_event_status{instance=~"127.+"})'
    becomes(lambda: prometheus.value(events), 3.0 * len(LIVE))

    check(prometheus, {**EVERYTHING, "vm": "|".join(LIVE)}, ("fleet", "Events listed now", 3))


def test_notice_is_counted_once_when_several_vms_report_it(prometheus: Prometheus) -> None:
    target = target_of("fleet", "Notice that Azure gave", "heatmap")

    def highest_count(vm: str) -> float:
        highest = 0.0
        for row in series(prometheus, target, {**EVERYTHING, "vm": vm}):
            if row.labels["le"] == "+Inf":
                highest = max(highest, *row.values)
        return highest

    def is_same_for_one_vm_and_all() -> bool:
        of_one = highest_count("EastUS_0")
        return of_one >= 1 and highest_count("EastUS_.*") == pytest.approx(of_one)

    # two queries are of two moments
    eventually(is_same_for_one_vm_and_all)
