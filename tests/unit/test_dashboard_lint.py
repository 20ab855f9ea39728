"""The dashboards as files: written by their code, as Grafana 13 defines them, and put together with care."""

import json
import re
from collections.abc import Iterator
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
UNITS = {value for name, value in vars(units).items() if isinstance(value, str) and not name.startswith("__")}
boards = pytest.mark.parametrize("board", [pytest.param(board, id=name) for name, board in BOARDS.items()])


def queries(board: dict[str, Any]) -> Iterator[str]:
    for panel in board["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    yield from (annotation["target"]["expr"] for annotation in board["annotations"]["list"])


def kind(panel: dict[str, Any]) -> str:
    return f"{panel['type'].replace('-', '')}Panel"


def errors(value: Any, definition: str) -> list[str]:
    schema = {**SCHEMA, "$ref": f"#/definitions/{definition}"}
    return [f"{list(error.path)}: {error.message}" for error in Draft7Validator(schema).iter_errors(value)]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_the_file_is_what_its_code_writes(name: str) -> None:
    written = (ROOT / "dashboards" / name).read_text(encoding="utf-8")
    assert written == DASHBOARDS[name](), f"dashboards/{name} is not what dashboards/src says: make dashboards"


def test_there_is_no_dashboard_without_its_code() -> None:
    assert {path.name for path in (ROOT / "dashboards").glob("*.json")} == set(DASHBOARDS)


@boards
def test_it_is_a_dashboard_of_panels_as_grafana_defines_them(board: dict[str, Any]) -> None:
    assert errors({**board, "panels": []}, "Board") == []
    assert {panel["title"]: found for panel in board["panels"] if (found := errors(panel, kind(panel)))} == {}


def test_the_schema_refuses_what_grafana_does_not_know() -> None:
    board = BOARDS["fleet.json"]
    assert errors({**board, "panels": [], "refresh": 30}, "Board")
    assert errors({**board["panels"][0], "options": {"colour": "red"}}, kind(board["panels"][0]))


def test_titles_and_uids_are_unique() -> None:
    for key in ("uid", "title"):
        assert len({board[key] for board in BOARDS.values()}) == len(BOARDS)


@boards
def test_ids_and_titles_of_panels_are_unique(board: dict[str, Any]) -> None:
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    assert all(number > 0 for number in ids)
    titles = [(panel["type"], panel["title"]) for panel in board["panels"]]
    assert len(set(titles)) == len(titles)


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
def test_the_data_source_is_a_variable_everywhere(board: dict[str, Any]) -> None:
    first, *others = board["templating"]["list"]
    assert (first["type"], first["name"], first["query"]) == ("datasource", "datasource", "prometheus")
    asking = [*board["panels"], *board["annotations"]["list"], *others]
    assert all(item["datasource"] == {"type": "prometheus", "uid": "${datasource}"} for item in asking)


@boards
def test_it_can_be_narrowed_down_as_far_as_its_metrics_go(board: dict[str, Any]) -> None:
    names = [variable["name"] for variable in board["templating"]["list"]]
    of_instances = board["uid"] == "notbefore-event-hub"
    assert names == ["datasource", *(("job", "region", "scale_set") if of_instances else VARIABLES)]
    used = {name for query in queries(board) for name in re.findall(r"\$([a-z_]\w*)", query)}
    assert used <= {*names, "__rate_interval", "__rate_interval_ms", "__range", "__range_s"}
    assert set(names[1:]) <= used


@boards
def test_it_shows_the_events_as_annotations(board: dict[str, Any]) -> None:
    assert [annotation["name"] for annotation in board["annotations"]["list"]] == ["Announced", "Started"]
    assert all(annotation["enable"] for annotation in board["annotations"]["list"])


@boards
def test_it_leads_to_the_others(board: dict[str, Any]) -> None:
    (link,) = board["links"]
    assert (link["type"], link["includeVars"], link["keepTime"]) == ("dashboards", True, True)
    assert set(link["tags"]) <= set(board["tags"])


@boards
def test_links_to_a_vm_lead_to_the_dashboard_there_is(board: dict[str, Any]) -> None:
    uids = {other["uid"] for other in BOARDS.values()}
    led = re.findall(r'"/d/([\w-]+)\?', json.dumps(board).replace('\\"', '"'))
    assert set(led) <= uids


@boards
def test_each_panel_says_what_it_shows_and_in_which_unit(board: dict[str, Any]) -> None:
    for panel in board["panels"]:
        assert panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        overridden = [one for item in panel["fieldConfig"]["overrides"] for one in item["properties"]]
        used = {panel["fieldConfig"]["defaults"]["unit"], *(one["value"] for one in overridden if one["id"] == "unit")}
        assert used <= UNITS, panel["title"]


@boards
def test_ranges_of_queries_follow_the_panel(board: dict[str, Any]) -> None:
    for target in (target for panel in board["panels"] for target in panel["targets"]):
        # at once over the whole time range; but for what it must not hide: agents and VMs that are silent, gone or down
        allowed = {"$__range", "1h", "6h", "7d"} if target.get("instant") else {"$__rate_interval"}
        assert set(re.findall(r"\[([^\]]+)\]", target["expr"])) <= allowed, target["expr"]
        counters = re.findall(r"\w+\((\w+(?:_total|_bucket|_sum|_count))\b(?![^[]*\[)", target["expr"])
        assert not counters, "a counter is shown by its rate or increase"


@boards
def test_queries_have_ids_of_their_own_and_legends(board: dict[str, Any]) -> None:
    for panel in board["panels"]:
        ids = [target["refId"] for target in panel["targets"]]
        assert len(set(ids)) == len(ids), panel["title"]
        for target in panel["targets"]:
            assert target["range"] is not target["instant"], panel["title"]
            if panel["type"] in ("timeseries", "statetimeline", "bargauge", "heatmap"):
                assert target["legendFormat"], panel["title"]


@boards
def test_thresholds_rise_from_a_base(board: dict[str, Any]) -> None:
    for panel in board["panels"]:
        overridden = [one["value"] for item in panel["fieldConfig"]["overrides"] for one in item["properties"]]
        for thresholds in (panel["fieldConfig"]["defaults"].get("thresholds"), *overridden):
            if isinstance(thresholds, dict) and "steps" in thresholds:
                base, *steps = [step["value"] for step in thresholds["steps"]]
                assert base is None, panel["title"]
                assert steps == sorted(set(steps)), panel["title"]
