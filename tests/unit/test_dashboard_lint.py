"""The dashboards as files: written by their code, as Grafana 13 defines them, and put together with
care.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.models import units
from jsonschema import Draft7Validator

from boards.__main__ import DASHBOARDS
from boards.parts import VARIABLES

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
GRAFANAS = {"__rate_interval", "__rate_interval_ms", "__range", "__range_s"}
boards = pytest.mark.parametrize(
    "board", [pytest.param(board, id=name) for name, board in BOARDS.items()]
)
panels = pytest.mark.parametrize(
    "panel",
    [
        pytest.param(one, id=f"{name} {one['title']}")
        for name, board in BOARDS.items()
        for one in board["panels"]
    ],
)


def errors(value: Any, definition: str) -> list[str]:
    schema = {**SCHEMA, "$ref": f"#/definitions/{definition}"}
    return [
        f"{list(error.path)}: {error.message}"
        for error in Draft7Validator(schema).iter_errors(value)
    ]


def test_the_files_are_what_their_code_writes() -> None:
    assert {path.name for path in (ROOT / "dashboards").glob("*.json")} == set(DASHBOARDS)
    for name, write in DASHBOARDS.items():
        written = (ROOT / "dashboards" / name).read_text(encoding="utf-8")
        assert written == write(), (
            f"dashboards/{name} is not what dashboards/src says: make dashboards"
        )


@boards
def test_it_is_a_dashboard_as_grafana_defines_it_and_leads_to_the_others(
    board: dict[str, Any],
) -> None:
    assert errors({**board, "panels": []}, "Board") == []
    assert errors({**board, "panels": [], "refresh": 30}, "Board"), (
        "the schema refuses what Grafana does not know"
    )
    for key in ("uid", "title"):
        assert [one[key] for one in BOARDS.values()].count(board[key]) == 1
    (link,) = board["links"]
    assert (link["type"], link["includeVars"], link["keepTime"]) == ("dashboards", True, True)
    assert set(link["tags"]) <= set(board["tags"])
    led = re.findall(r'"/d/([\w-]+)\?', json.dumps(board).replace('\\"', '"'))
    assert set(led) <= {other["uid"] for other in BOARDS.values()}


@boards
def test_the_panels_fill_one_screen_without_gap_or_overlap(board: dict[str, Any]) -> None:
    places = [panel["gridPos"] for panel in board["panels"]]
    cells = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    height = max(y for _, y in cells) + 1
    assert height <= SCREEN
    assert sorted(cells) == [(x, y) for x in range(24) for y in range(height)]


@boards
def test_what_it_asks_can_be_narrowed_down_and_is_asked_of_the_chosen_source(
    board: dict[str, Any],
) -> None:
    first, *others = board["templating"]["list"]
    assert (first["type"], first["name"], first["query"]) == (
        "datasource",
        "datasource",
        "prometheus",
    )
    names = [variable["name"] for variable in others]
    assert names == (
        ["job", "region", "scale_set"] if board["uid"] == "notbefore-event-hub" else [*VARIABLES]
    )
    annotations = board["annotations"]["list"]
    assert [(one["name"], one["enable"]) for one in annotations] == [
        ("Announced", True),
        ("Started", True),
    ]
    assert all(item["datasource"] == SOURCE for item in [*board["panels"], *annotations, *others])
    targets = [target for panel in board["panels"] for target in panel["targets"]]
    asked = [
        one["expr"] for one in [*targets, *(annotation["target"] for annotation in annotations)]
    ]
    used = {name for query in asked for name in re.findall(r"\$([a-z_]\w*)", query)}
    assert used - GRAFANAS == set(names)
    for key in ("id", "title"):
        found = [(panel["type"] if key == "title" else "", panel[key]) for panel in board["panels"]]
        assert len(set(found)) == len(found)


@panels
def test_a_panel_says_what_it_shows_in_which_unit_and_from_which_thresholds(
    panel: dict[str, Any],
) -> None:
    kind = f"{panel['type'].replace('-', '')}Panel"
    assert errors(panel, kind) == []
    assert panel["id"] > 0
    assert panel["title"]
    assert panel["description"].endswith(".")
    defaults = panel["fieldConfig"]["defaults"]
    overridden = [one for item in panel["fieldConfig"]["overrides"] for one in item["properties"]]
    assert {defaults["unit"], *(one["value"] for one in overridden if one["id"] == "unit")} <= UNITS
    for thresholds in (defaults.get("thresholds"), *(one["value"] for one in overridden)):
        if isinstance(thresholds, dict) and "steps" in thresholds:
            base, *steps = [step["value"] for step in thresholds["steps"]]
            assert base is None
            assert steps == sorted(set(steps))


@panels
def test_queries_have_ids_and_legends_and_their_ranges_follow_the_panel(
    panel: dict[str, Any],
) -> None:
    ids = [target["refId"] for target in panel["targets"]]
    assert len(set(ids)) == len(ids)
    for target in panel["targets"]:
        assert target["range"] is not target["instant"]
        assert target.get("legendFormat") or panel["type"] not in (
            "timeseries",
            "statetimeline",
            "bargauge",
            "heatmap",
        )
        # at once over the whole time range; but for what it must not hide: agents and VMs that are
        # silent, gone or down
        allowed = {"$__range", "1h", "6h", "7d"} if target["instant"] else {"$__rate_interval"}
        assert set(re.findall(r"\[([^\]]+)\]", target["expr"])) <= allowed, target["expr"]
        counters = re.findall(
            r"\w+\((\w+(?:_total|_bucket|_sum|_count))\b(?![^[]*\[)", target["expr"]
        )
        assert not counters, "a counter is shown by its rate or increase"
