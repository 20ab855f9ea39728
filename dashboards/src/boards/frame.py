"""A whole dashboard: variables, annotations, links, and the grid of its panels."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as board

from boards import queries
from boards.panels import SOURCE, over_time

TAG: Final = "notbefore"
VARIABLES: Final = {  # a variable, its label, the label of notbefore_vm_info
    "region": ("Region", "location"),
    "group": ("Resource group", "resource_group"),
    "scale_set": ("Scale set", "scale_set"),
    "vm": ("VM", "name"),
}


def vm_link(field: str) -> str:
    """Return the address of the dashboard of the VM that a cell names."""
    names = [name for name in ("datasource", *VARIABLES) if name != "vm"]
    variables = "&".join(f"${{{name}:queryparam}}" for name in names)
    return f"/d/notbefore-vm?{variables}&var-vm=${{__data.fields.{field}}}&${{__url_time_range}}"


def grid(*rows: tuple[int, Sequence[tuple[int, board.Panel]]]) -> list[board.Panel]:
    """Give panels their places and ids, and return them.

    ``rows``: (height, [(width, panel), ...]), from the top. Grafana's grid has 24 columns.
    """
    placed: list[board.Panel] = []
    top = 0
    for height, row in rows:
        left = 0
        for width, panel in row:
            panel.grid_pos = board.GridPos(h=height, w=width, x=left, y=top)
            panel.id_val = len(placed) + 1
            placed.append(panel)
            left += width
        top += height
    return placed


@dataclass(frozen=True)
class Variable:
    """A variable of a dashboard, from which a reader chooses values."""

    name: str
    label: str
    query: str  # gives its values


@dataclass(frozen=True)
class Annotation:
    """Regions that mark when the series of a query exist."""

    name: str
    color: str
    expr: str
    text: str  # with labels of the series, as ``{{label}}``
    tags: str  # labels of the series


def dashboard_json(
    uid: str,
    title: str,
    description: str,
    panels: list[board.Panel],
    *,
    time: str,
    variables: Sequence[Variable] = (),
    annotations: Sequence[Annotation] = (),
    one_vm: bool = False,
) -> str:
    """Return a dashboard as JSON.

    ``variables`` and ``annotations``: those of the agents' metrics by default. ``one_vm``: a reader
    chooses one VM, and sees the events that affect it.
    """
    builder = dashboard.Dashboard(title).uid(uid).description(description).tags([TAG]).editable()
    builder.time(f"now-{time}", "now").refresh("30s").timezone("browser").tooltip(
        board.DashboardCursorSync.CROSSHAIR
    )
    builder.with_variable(
        dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    )
    for variable in variables or [_of_vms(name) for name in VARIABLES]:
        is_single = one_vm and variable.name == "vm"
        builder.with_variable(_variable(variable, is_single=is_single))
    events = (
        _of_events("Announced", "Scheduled", "yellow", hits_only=one_vm),
        _of_events("Started", "Started", "red", hits_only=one_vm),
    )
    for annotation in annotations or events:
        builder.annotation(_annotation(annotation))
    links = (
        dashboard.DashboardLink("notbefore").type(board.DashboardLinkType.DASHBOARDS).tags([TAG])
    )
    builder.link(links.include_vars(True).keep_time(True))
    built = builder.build()
    built.panels = [*panels]
    values = json.loads(JSONEncoder().encode(built))
    _tidy(values)
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def _tidy(values: dict[str, Any]) -> None:
    """Remove values that the SDK writes although they belong to other kinds, and the separate menu
    of links.
    """
    for item in (*values["links"], *values["annotations"]["list"]):
        item.pop("placement", None)
    for panel in values["panels"]:
        panel["options"].pop("footer", None)
    for variable in values["templating"]["list"]:
        for key in ("auto", "auto_count", "auto_min"):
            variable.pop(key, None)


def _of_vms(name: str) -> Variable:
    """Return a variable of VMs, with the values that the variables before it leave."""
    title, label = VARIABLES[name]
    selectors: list[str] = []
    for other, (_, other_label) in VARIABLES.items():
        if other == name:
            break
        selectors.append(f'{other_label}=~"${other}"')
    info = "notbefore_vm_info"
    if selectors:
        info += f"{{{', '.join(selectors)}}}"
    return Variable(name, title, f"label_values({info}, {label})")


def _variable(values: Variable, *, is_single: bool) -> dashboard.QueryVariable:
    variable = dashboard.QueryVariable(values.name).label(values.label).datasource(SOURCE)
    variable.query({"qryType": 1, "query": values.query, "refId": "Variable"})
    variable.refresh(board.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(
        board.VariableSort.NATURAL_ASC
    )
    if is_single:
        return variable.multi(False).include_all(False)
    # "All" is .* and not a list of the values: VMs without a scale set have an empty one
    everything = board.VariableOption(selected=True, text="All", value="$__all")
    return variable.multi(True).include_all(True).all_value(".*").current(everything)


def _of_events(name: str, status: str, color: str, *, hits_only: bool) -> Annotation:
    """Return the annotation of the events with a status. It has each event once.

    ``hits_only``: without events that affect only other VMs of the group.
    """
    labels = "event_id, event_type, event_source, description"
    scope = ', scope!="peer"' if hits_only else ""
    expr = queries.events(f'{{event_status="{status}"{scope}}}', by=labels)
    return Annotation(
        name, color, expr, "{{description}} ({{event_id}})", "event_type,event_source"
    )


def _annotation(regions: Annotation) -> dashboard.AnnotationQuery:
    annotation = dashboard.AnnotationQuery().name(regions.name).datasource(SOURCE)
    annotation.enable(True).hide(False)
    annotation.icon_color(regions.color).target(over_time(regions.expr, "", "Anno"))
    annotation.title_format(f"{{{{event_type}}}} {regions.name.lower()}").text_format(regions.text)
    return annotation.tag_keys(regions.tags)
