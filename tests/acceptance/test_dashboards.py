"""Every query of the dashboards, asked of a real Prometheus that has scraped real agents."""

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
PANELS = [(name, panel) for name, board in BOARDS.items() for panel in board["panels"]]


def target_of(name: str, title: str, kind: str, ref: str = "") -> dict[str, Any]:
    """A panel's first query, or the one that is named."""
    (panel,) = (
        panel
        for panel in BOARDS[name]["panels"]
        if (panel["title"], panel["type"]) == (title, kind)
    )
    target: dict[str, Any] = next(
        target for target in panel["targets"] if ref in ("", target["refId"])
    )
    return target


def check(
    prometheus: Prometheus, chosen: dict[str, str], *expected: tuple[str, str, float]
) -> None:
    """What single numbers of the dashboards say: (dashboard, panel, number)."""
    for name, title, number in expected:
        target = target_of(name, title, "stat")
        becomes(
            lambda: (title, *(row.values for row in series(prometheus, target, chosen))),
            (title, [number]),
        )


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    needs("prometheus", "promtool")
    with watched_fleet(tmp_path_factory.mktemp("fleet"), hours=HOURS) as running:
        yield running


# few tests, each of many queries: those of a file may be run by several processes, and each has a
# fleet of its own. Each look waits: an agent that answers a scrape late is away from all queries
# until the next one


def test_every_query_finds_series_with_the_labels_that_are_shown(
    prometheus: Prometheus,
) -> None:
    becomes(
        lambda: [
            fault
            for name, board in BOARDS.items()
            for fault in faults(prometheus, board, CHOSEN[name])
        ],
        [],
    )


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
                # sums: see the next test
                assert row.labels.get("name", LIVE[0]) == LIVE[0], panel["title"]
                assert not row.labels.get("event_id", "").startswith(("EASTUS", "DB-")), panel[
                    "title"
                ]


def test_sums_are_empty_when_no_vm_is_chosen(prometheus: Prometheus) -> None:
    """Sums name no VM: with none chosen each must be nothing, or 0."""
    nobody = {**EVERYTHING, "vm": "nobody"}
    expected = {
        ("fleet", "Silent or failing agents", "A"),  # those that never said who they are
        ("fleet", "Silent or failing agents", "age"),
        ("fleet", "Notice: promised and given", "promised"),  # Azure's, to all
    }

    asked = [
        (name, panel["title"], target) for name, panel in PANELS for target in panel["targets"]
    ]

    becomes(
        lambda: {
            (name, title, target["refId"])
            for name, title, target in asked
            if any(any(row.values) for row in series(prometheus, target, nobody))
        },
        expected,
    )
    for board in BOARDS.values():
        for annotation in board["annotations"]["list"]:
            assert series(prometheus, annotation["target"], nobody) == []


def test_single_numbers_are_those_of_the_fleet(prometheus: Prometheus) -> None:
    check(prometheus, ONE, ("notbefore", "Agents", 1), ("fleet", "Silent or failing agents", 2))
    check(
        prometheus,
        EVERYTHING,
        ("fleet", "Silent or failing agents", 6),  # EastUS_2 fails in two ways, and is one
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

    wanted = [
        ("IMDS does not answer", "EastUS_2"),
        ("cannot be scraped", STOPPED),
        ("cannot be scraped", SILENT),  # for longer than the time range
        ("gone from the scrape", "EastUS_1"),
        ("never polled", None),
        ("never scraped", None),
        ("state cannot be written", "EastUS_2"),
    ]

    becomes(failing, wanted)


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
    # last reported as Scheduled
    lost = {
        "name": SILENT,
        "event_id": LOST,
        "event_status": "Started",
        "scope": "self",
    }
    for name, title in (("fleet", "Scheduled and started events"), ("vm", "Listed now")):
        target = target_of(name, title, "table")
        becomes(
            lambda: [
                lost.items() <= row.labels.items() for row in series(prometheus, target, chosen)
            ],
            [True],
        )


def test_annotations_of_a_vm_are_its_own_events(prometheus: Prometheus) -> None:
    for annotation in BOARDS["vm"]["annotations"]["list"]:
        rows = eventually(
            lambda: series(prometheus, annotation["target"], {**EVERYTHING, "vm": "db-a"})
        )
        assert LOST not in {row.labels["event_id"] for row in rows}


def test_event_is_counted_once_when_several_vms_report_it(prometheus: Prometheus) -> None:
    becomes(
        lambda: prometheus.value('count(azure_scheduled_event_status{instance=~"127.+"})'), 2.0 * 3
    )

    check(prometheus, {**EVERYTHING, "vm": "|".join(LIVE)}, ("fleet", "Events listed now", 3))

    def reported(vm: str) -> float:
        rows = series(
            prometheus,
            target_of("fleet", "Notice that Azure gave", "heatmap"),
            {**EVERYTHING, "vm": vm},
        )
        highest: float = max(
            value for row in rows if row.labels["le"] == "+Inf" for value in row.values
        )
        return highest

    # each is of its own moment
    eventually(lambda: reported("EastUS_.*") == pytest.approx(reported("EastUS_0")))
    assert reported("EastUS_0") >= 1
