"""The dashboards as files: written by their code, valid for Grafana 13, complete on one screen."""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.models import units
from jsonschema import Draft7Validator

from boards.__main__ import DASHBOARDS
from boards.frame import VARIABLES

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "tests/grafana/dashboard.schema.json").read_bytes())
BOARDS: dict[str, dict[str, Any]] = {
    name: json.loads((ROOT / "dashboards" / name).read_bytes()) for name in sorted(DASHBOARDS)
}
SCREEN = 26  # lines of Grafana's grid that a screen of 1080 lines shows
UNITS = {
    value
    for name, value in vars(units).items()
    if isinstance(value, str) and not name.startswith("__")
}
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
VARIABLES_OF_GRAFANA = {"__rate_interval", "__rate_interval_ms", "__range", "__range_s"}


def all_panels() -> Iterator[Any]:
    """Yield each panel as a case of a test."""
    for name, board in BOARDS.items():
        for panel in board["panels"]:
            yield pytest.param(panel, id=f"{name} {panel['title']}")


def all_queries(*panel_types: str) -> Iterator[Any]:
    """Yield each query of panels, of all types or of these, as a case of a test."""
    for name, board in BOARDS.items():
        for panel in board["panels"]:
            if not panel_types or panel["type"] in panel_types:
                for target in panel["targets"]:
                    yield pytest.param(target, id=f"{name} {panel['title']} {target['refId']}")


each_board = pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS.keys())
each_panel = pytest.mark.parametrize("panel", list(all_panels()))
each_query = pytest.mark.parametrize("target", list(all_queries()))


def schema_errors(value: Any, definition: str) -> list[str]:
    schema = {**SCHEMA, "$ref": f"#/definitions/{definition}"}
    errors = Draft7Validator(schema).iter_errors(value)
    return [f"{list(error.path)}: {error.message}" for error in errors]


# ---- files


def test_directory_has_a_file_for_each_dashboard() -> None:
    names = {path.name for path in (ROOT / "dashboards").glob("*.json")}

    assert names == set(DASHBOARDS)


@pytest.mark.parametrize("name", DASHBOARDS)
def test_file_is_written_by_its_code(name: str) -> None:
    text = (ROOT / "dashboards" / name).read_text(encoding="utf-8")

    assert text == DASHBOARDS[name](), "it is stale: make dashboards"


# ---- dashboards


@each_board
def test_dashboard_is_valid_for_grafana(board: dict[str, Any]) -> None:
    assert schema_errors({**board, "panels": []}, "Board") == []


@each_board
def test_schema_refuses_a_dashboard_that_grafana_does_not_know(board: dict[str, Any]) -> None:
    unknown = {**board, "panels": [], "refresh": 30}

    assert schema_errors(unknown, "Board")


@each_board
@pytest.mark.parametrize("key", ["uid", "title"])
def test_dashboard_has_a_unique_uid_and_title(key: str, board: dict[str, Any]) -> None:
    values = [other[key] for other in BOARDS.values()]

    assert values.count(board[key]) == 1


@each_board
def test_dashboard_links_to_the_others(board: dict[str, Any]) -> None:
    (link,) = board["links"]

    assert link["type"] == "dashboards"
    assert link["includeVars"] is True
    assert link["keepTime"] is True
    assert set(link["tags"]) <= set(board["tags"])


@each_board
def test_links_of_panels_lead_to_dashboards(board: dict[str, Any]) -> None:
    text = json.dumps(board).replace('\\"', '"')

    linked = set(re.findall(r'"/d/([\w-]+)\?', text))

    assert linked <= {other["uid"] for other in BOARDS.values()}


@each_board
def test_panels_fill_one_screen_without_gap_or_overlap(board: dict[str, Any]) -> None:
    cells = []
    for panel in board["panels"]:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                cells.append((x, y))

    height = max(y for _, y in cells) + 1
    screen = itertools.product(range(24), range(height))
    assert height <= SCREEN
    assert sorted(cells) == list(screen)


def variables(board: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the variables of a dashboard, without that of its data source."""
    return list(board["templating"]["list"][1:])


def annotations(board: dict[str, Any]) -> list[dict[str, Any]]:
    return list(board["annotations"]["list"])


@each_board
def test_first_variable_is_the_data_source(board: dict[str, Any]) -> None:
    first = board["templating"]["list"][0]

    assert first["type"] == "datasource"
    assert first["name"] == "datasource"
    assert first["query"] == "prometheus"


@each_board
def test_dashboard_has_the_usual_variables(board: dict[str, Any]) -> None:
    names = [variable["name"] for variable in variables(board)]

    if board["uid"] == "notbefore-event-hub":
        assert names == ["job", "region", "scale_set"]
    else:
        assert names == [*VARIABLES]


@each_board
def test_dashboard_shows_announcements_and_starts(board: dict[str, Any]) -> None:
    announced, started = annotations(board)

    assert announced["name"] == "Announced"
    assert announced["enable"] is True
    assert started["name"] == "Started"
    assert started["enable"] is True


@each_board
def test_queries_use_the_chosen_data_source(board: dict[str, Any]) -> None:
    elements = [*board["panels"], *annotations(board), *variables(board)]

    assert [element for element in elements if element["datasource"] != SOURCE] == []


@each_board
def test_queries_use_each_variable(board: dict[str, Any]) -> None:
    targets = [annotation["target"] for annotation in annotations(board)]
    for panel in board["panels"]:
        targets += panel["targets"]

    used: set[str] = set()
    for target in targets:
        used.update(re.findall(r"\$([a-z_]\w*)", target["expr"]))

    assert used - VARIABLES_OF_GRAFANA == {variable["name"] for variable in variables(board)}


@each_board
def test_panels_have_unique_ids(board: dict[str, Any]) -> None:
    ids = [panel["id"] for panel in board["panels"]]

    assert len(set(ids)) == len(ids)


@each_board
def test_panels_of_one_type_have_unique_titles(board: dict[str, Any]) -> None:
    titles = [(panel["type"], panel["title"]) for panel in board["panels"]]

    assert len(set(titles)) == len(titles)


# ---- panels


def overridden_properties(panel: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for override in panel["fieldConfig"]["overrides"]:
        yield from override["properties"]


@each_panel
def test_panel_is_valid_for_grafana(panel: dict[str, Any]) -> None:
    definition = f"{panel['type'].replace('-', '')}Panel"

    assert schema_errors(panel, definition) == []
    assert panel["id"] > 0


@each_panel
def test_panel_has_title_and_description(panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert panel["description"].endswith(".")


@each_panel
def test_panel_has_units_that_grafana_knows(panel: dict[str, Any]) -> None:
    used = {panel["fieldConfig"]["defaults"]["unit"]}
    for item in overridden_properties(panel):
        if item["id"] == "unit":
            used.add(item["value"])

    assert used <= UNITS


@each_panel
def test_panel_has_rising_thresholds(panel: dict[str, Any]) -> None:
    values = [panel["fieldConfig"]["defaults"].get("thresholds")]
    values += [item["value"] for item in overridden_properties(panel)]

    for thresholds in values:
        if isinstance(thresholds, dict) and "steps" in thresholds:
            base, *steps = [step["value"] for step in thresholds["steps"]]
            assert base is None
            assert steps == sorted(set(steps))


# ---- queries


@each_panel
def test_queries_have_unique_ids(panel: dict[str, Any]) -> None:
    ids = [target["refId"] for target in panel["targets"]]

    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(
    "target",
    list(all_queries("timeseries", "state-timeline", "bargauge", "heatmap")),
)
def test_query_of_a_panel_with_series_has_a_legend(target: dict[str, Any]) -> None:
    assert target.get("legendFormat")


@each_query
def test_query_is_either_for_a_range_or_for_an_instant(target: dict[str, Any]) -> None:
    assert target["range"] is not target["instant"]


@each_query
def test_ranges_of_a_query_follow_the_panel(target: dict[str, Any]) -> None:
    allowed = {"$__rate_interval"}
    if target["instant"]:
        # the whole time range at once, but for agents and VMs that are silent, gone or down,
        # which it must not hide
        allowed = {"$__range", "1h", "6h", "7d"}

    ranges = set(re.findall(r"\[([^\]]+)\]", target["expr"]))

    assert ranges <= allowed


@each_query
def test_counters_are_shown_by_rate_or_increase(target: dict[str, Any]) -> None:
    without_range = r"\w+\((\w+(?:_total|_bucket|_sum|_count))\b(?![^[]*\[)"

    assert not re.findall(without_range, target["expr"])
