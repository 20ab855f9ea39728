"""What the dashboards are put together from: panels and queries, variables, annotations, links, the
grid.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
)
from grafana_foundation_sdk.builders import timeseries as lines
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as models
from grafana_foundation_sdk.models import dashboard as board
from grafana_foundation_sdk.models import heatmap as heat
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from boards import queries
from notbefore.core.routing import NEAR

TAG: Final = "notbefore"
COLUMNS: Final = 24  # of Grafana's grid
SOURCE: Final = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
VARIABLES: Final = {  # a variable, its label, the label of notbefore_vm_info
    "region": ("Region", "location"),
    "group": ("Resource group", "resource_group"),
    "scale_set": ("Scale set", "scale_set"),
    "vm": ("VM", "name"),
}

# names of Grafana's palette: each theme has its own shade of them
COLORS: Final = {
    "Freeze": "blue",
    "Reboot": "orange",
    "Redeploy": "purple",
    "Preempt": "red",
    "Terminate": "dark-red",
    "SpotRebalanceRecommendation": "yellow",
    "announced": "yellow",
    "updated": "light-blue",
    "started": "orange",
    "finished": "green",
    "canceled": "blue",
    "ended": "purple",
}

# from this value on, this colour; the first has no value
Steps = Sequence[tuple[float | None, str]]
PLAIN: Final[Steps] = ((None, "text"),)
GOOD: Final[Steps] = ((None, "green"),)
NONE_IS_GOOD: Final[Steps] = ((None, "green"), (1, "red"))
NONE_IS_CALM: Final[Steps] = ((None, "green"), (1, "orange"))
COUNTDOWN: Final[Steps] = (
    (None, "text"),
    (0, "red"),
    (300, "orange"),
    (900, "yellow"),
    (int(NEAR), "green"),
)
AGE: Final[Steps] = ((None, "green"), (15, "yellow"), (60, "red"))

Query = prometheus.Dataquery


@dataclass(frozen=True)
class Column:
    """A column of a table: the label or query it comes from, its title, and how it is shown."""

    field: str
    title: str
    unit: str = ""
    steps: Steps = ()
    width: int = 0  # pixels; 0: what is left
    decimals: int | None = None
    nan: str = ""  # what is said instead of NaN

    def properties(self) -> list[board.DynamicConfigValue]:
        """What is particular to it, as Grafana's overrides."""
        # in a cell; what the panel says is for when there is no row
        found: dict[str, object] = {"noValue": "-"}
        if self.unit:
            found["unit"] = self.unit
        if self.decimals is not None:
            found["decimals"] = self.decimals
        if self.width:
            found["custom.width"] = self.width
        if self.steps:
            found["thresholds"] = _thresholds(self.steps).build()
            found["custom.cellOptions"] = models.TableColorTextCellOptions()
        if self.nan:
            match = board.DashboardSpecialValueMapOptions(
                match=board.SpecialValueMatch.NA_N,
                result=board.ValueMappingResult(text=self.nan, color="red"),
            )
            found["mappings"] = [board.SpecialValueMap(options=match)]
        return [board.DynamicConfigValue(key, value) for key, value in found.items()]


def over_time(expr: str, legend: str, ref: str = "A") -> Query:
    """A query for a panel over time."""
    return Query().expr(expr).legend_format(legend).ref_id(ref).range()


def now(expr: str, legend: str = "", ref: str = "A") -> Query:
    """A query for a panel that shows one moment."""
    return Query().expr(expr).legend_format(legend).ref_id(ref).instant()


def rows(expr: str, ref: str) -> Query:
    """A query whose series are rows of a table; its values stand in the field ``Value #REF``."""
    return Query().expr(expr).ref_id(ref).instant().format(PromQueryFormat.TABLE)


def stat_panel(
    title: str,
    description: str,
    unit: str,
    asked: Query,
    steps: Steps,
    *,
    none: str = "none",
    decimals: int = 0,
) -> board.Panel:
    """One number."""
    panel = (
        stat.Panel()
        .with_target(asked)
        .unit(unit)
        .thresholds(_thresholds(steps))
        .no_value(none)
        .decimals(decimals)
    )
    panel.color_scheme(_coloring(board.FieldColorModeId.THRESHOLDS)).color_mode(
        models.BigValueColorMode.VALUE
    )
    panel.graph_mode(models.BigValueGraphMode.NONE).reduce_options(_last())
    return _described(panel, title, description)


def lines_panel(
    title: str,
    description: str,
    unit: str,
    *asked: Query,
    stacked: bool = False,
    dots: bool = False,
    points: int = 0,
) -> board.Panel:
    """Series over time: lines, dots, or stacked bars; at most ``points`` of them."""
    panel = lines.Panel().targets(list(asked)).unit(unit).min(0)
    if unit == "short":
        panel.decimals(0)  # it counts: there is no half an event
    panel.legend(
        common.VizLegendOptions()
        .show_legend(True)  # noqa: FBT003 - the SDK has it so
        .display_mode(models.LegendDisplayMode.LIST)
        .placement(models.LegendPlacement.BOTTOM)
        .calcs([])
    )
    panel.tooltip(
        common.VizTooltipOptions()
        .mode(models.TooltipDisplayMode.MULTI)
        .sort(models.SortOrder.DESCENDING)
    )
    panel.show_points(models.VisibilityMode.AUTO).line_width(1)
    if stacked:
        panel.draw_style(models.GraphDrawStyle.BARS).fill_opacity(70).line_width(0)
        panel.stacking(common.StackingConfig().mode(models.StackingMode.NORMAL))
    if dots:
        panel.draw_style(models.GraphDrawStyle.POINTS).point_size(7)
    if points:
        panel.max_data_points(points)
    for name, color in COLORS.items():
        panel.override_by_name(name, [_fixed(color)])
    return _described(panel, title, description)


def bars_panel(
    title: str, description: str, unit: str, asked: Query, steps: Steps = GOOD
) -> board.Panel:
    """One bar a series."""
    panel = (
        bargauge.Panel()
        .with_target(asked)
        .unit(unit)
        .min(0)
        .decimals(0)
        .thresholds(_thresholds(steps))
    )
    panel.orientation(models.VizOrientation.HORIZONTAL).display_mode(
        models.BarGaugeDisplayMode.BASIC
    )
    panel.color_scheme(_coloring(board.FieldColorModeId.THRESHOLDS)).reduce_options(
        _last()
    ).no_value("none")
    for name, color in COLORS.items():
        panel.override_by_name(name, [_fixed(color)])
    return _described(panel, title, description)


def heatmap_panel(title: str, description: str, unit: str, expr: str) -> board.Panel:
    """Buckets over time; ``expr`` gives them cumulative, by ``le``."""
    asked = over_time(expr, "{{le}}").format(PromQueryFormat.HEATMAP)
    panel = heatmap.Panel().with_target(asked).unit(unit).max_data_points(48).hide_legend()
    panel.color(
        heatmap.HeatmapColorOptions()
        .mode(heat.HeatmapColorMode.SCHEME)
        .scheme("Oranges")
        .steps(32)
        .exponent(0.5)
        .fill("dark-orange")
        .reverse(False)  # noqa: FBT003 - the SDK has it so
    )
    panel.y_axis(heatmap.YAxisConfig().unit(unit)).cell_gap(1)
    panel.filter_values(heatmap.FilterValueRange().le(1e-9)).show_value(models.VisibilityMode.NEVER)
    panel.tooltip(heatmap.HeatmapTooltip().mode(models.TooltipDisplayMode.SINGLE))
    return _described(panel, title, description)


def table_panel(
    title: str,
    description: str,
    asked: Sequence[Query],
    columns: Sequence[Column],
    *,
    none: str = "none",
    links: Mapping[str, str] | None = None,
    sort: str = "",
) -> board.Panel:
    """A table: the rows of the queries, put together where their labels are the same."""
    panel = (
        table.Panel()
        .targets(list(asked))
        .unit("none")
        .no_value(none)
        .cell_height(models.TableCellHeight.SM)
    )
    panel.cell_options(models.TableAutoCellOptions()).min_width(40)
    panel.with_transformation(board.DataTransformerConfig("merge", options={}))
    order = {column.field: number for number, column in enumerate(columns)}
    names = {column.field: column.title for column in columns}
    options = {
        "indexByName": order,
        "renameByName": names,
        "includeByName": dict.fromkeys(order, True),
    }
    panel.with_transformation(board.DataTransformerConfig("organize", options=options))
    for column in columns:
        properties = column.properties()
        if links and column.title in links:
            link = {"title": "This VM", "url": links[column.title]}
            properties.append(board.DynamicConfigValue("links", [link]))
        if properties:
            panel.override_by_name(column.title, properties)
    if sort:
        panel.sort_by([common.TableSortByFieldState().display_name(sort).desc(False)])  # noqa: FBT003 - the SDK's
    return _described(panel, title, description)


def timeline_panel(
    title: str, description: str, states: Mapping[str, tuple[str, str]], asked: Query
) -> board.Panel:
    """The states of each series over time: value -> its name and colour."""
    panel = (
        statetimeline.Panel()
        .with_target(asked)
        .unit("none")
        .row_height(0.8)
        .line_width(0)
        .fill_opacity(80)
    )
    panel.show_value(models.VisibilityMode.AUTO).merge_values(True)  # noqa: FBT003 - the SDK has it so
    results = {
        value: board.ValueMappingResult(text=text, color=color)
        for value, (text, color) in states.items()
    }
    panel.mappings([board.ValueMap(results)]).thresholds(_thresholds(PLAIN))
    panel.color_scheme(_coloring(board.FieldColorModeId.THRESHOLDS)).no_value("none")
    panel.legend(
        common.VizLegendOptions()
        .show_legend(False)  # noqa: FBT003 - the SDK has it so
        .display_mode(models.LegendDisplayMode.LIST)
        .placement(models.LegendPlacement.BOTTOM)
        .calcs([])
    )
    panel.tooltip(
        common.VizTooltipOptions()
        .mode(models.TooltipDisplayMode.SINGLE)
        .sort(models.SortOrder.NONE)
    )
    return _described(panel, title, description)


def vm_link(field: str) -> str:
    """The dashboard of the VM that a cell names."""
    kept = "&".join(
        f"${{{name}:queryparam}}" for name in ("datasource", *VARIABLES) if name != "vm"
    )
    return f"/d/notbefore-vm?{kept}&var-vm=${{__data.fields.{field}}}&${{__url_time_range}}"


def grid(*lines_: tuple[int, Sequence[tuple[int, board.Panel]]]) -> list[board.Panel]:
    """Lines of panels, each (height, [(width, panel), ...]), from the top.

    They get their places and ids.
    """
    placed: list[board.Panel] = []
    top = 0
    for height, line in lines_:
        left = 0
        for width, panel in line:
            panel.grid_pos = board.GridPos(h=height, w=width, x=left, y=top)
            panel.id_val = len(placed) + 1
            placed.append(panel)
            left += width
        top += height
    return placed


@dataclass(frozen=True)
class Variable:
    """A variable of a dashboard: its name, its label, and the query that gives its values."""

    name: str
    label: str
    query: str


@dataclass(frozen=True)
class Annotation:
    """The time in which the series of a query exist, as regions.

    Title and text are filled in with their labels.
    """

    name: str
    color: str
    expr: str
    text: str
    tags: str


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
    """The dashboard as JSON.

    Without ``variables`` and ``annotations`` it has those of the agents' metrics.
    """
    builder = dashboard.Dashboard(title).uid(uid).description(description).tags([TAG]).editable()
    builder.time(f"now-{time}", "now").refresh("30s").timezone("browser").tooltip(
        board.DashboardCursorSync.CROSSHAIR
    )
    builder.with_variable(
        dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    )
    for one in variables or [_of_vms(name) for name in VARIABLES]:
        builder.with_variable(_variable(one, one=one_vm and one.name == "vm"))
    for annotation in annotations or (
        _of_events("Announced", "Scheduled", "yellow", hits_only=one_vm),
        _of_events("Started", "Started", "red", hits_only=one_vm),
    ):
        builder.annotation(_annotation(annotation))
    links = (
        dashboard.DashboardLink("notbefore").type(board.DashboardLinkType.DASHBOARDS).tags([TAG])
    )
    builder.link(links.include_vars(True).keep_time(True))  # noqa: FBT003 - the SDK has it so
    built = builder.build()
    built.panels = [*panels]
    values = json.loads(JSONEncoder().encode(built))
    _tidy(values)
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def _tidy(values: dict[str, Any]) -> None:
    """Leave out what the SDK writes and is not wanted: what is for other kinds, and links in a menu
    of their own.
    """
    for item in (*values["links"], *values["annotations"]["list"]):
        item.pop("placement", None)
    for panel in values["panels"]:
        panel["options"].pop("footer", None)
    for variable in values["templating"]["list"]:
        for key in ("auto", "auto_count", "auto_min"):
            variable.pop(key, None)


def _of_vms(name: str) -> Variable:
    title, label = VARIABLES[name]
    before = list(VARIABLES)[: list(VARIABLES).index(name)]
    chosen = ", ".join(f'{VARIABLES[other][1]}=~"${other}"' for other in before)
    info = f"notbefore_vm_info{{{chosen}}}" if chosen else "notbefore_vm_info"
    return Variable(name, title, f"label_values({info}, {label})")


def _variable(wanted: Variable, *, one: bool) -> dashboard.QueryVariable:
    variable = dashboard.QueryVariable(wanted.name).label(wanted.label).datasource(SOURCE)
    variable.query({"qryType": 1, "query": wanted.query, "refId": "Variable"})
    variable.refresh(board.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(
        board.VariableSort.NATURAL_ASC
    )
    if one:
        return variable.multi(False).include_all(False)  # noqa: FBT003 - the SDK has it so
    # All is .* and not a list of what there is: VMs without a scale set have an empty one
    everything = board.VariableOption(selected=True, text="All", value="$__all")
    return variable.multi(True).include_all(True).all_value(".*").current(everything)  # noqa: FBT003 - the SDK's


def _of_events(name: str, status: str, color: str, *, hits_only: bool) -> Annotation:
    """The time in which events were listed with a status; an event is one, whoever reports it."""
    labels = "event_id, event_type, event_source, description"
    # or else those of a VM's neighbours are shown as its own
    hits = ', scope!="peer"' if hits_only else ""
    expr = queries.events(f'{{event_status="{status}"{hits}}}', by=labels)
    return Annotation(
        name, color, expr, "{{description}} ({{event_id}})", "event_type,event_source"
    )


def _annotation(wanted: Annotation) -> dashboard.AnnotationQuery:
    annotation = dashboard.AnnotationQuery().name(wanted.name).datasource(SOURCE)
    annotation.enable(True).hide(False)  # noqa: FBT003 - the signature is the SDK's
    annotation.icon_color(wanted.color).target(over_time(wanted.expr, "", "Anno"))
    annotation.title_format(f"{{{{event_type}}}} {wanted.name.lower()}").text_format(wanted.text)
    return annotation.tag_keys(wanted.tags)


def _described(panel: Builder[board.Panel], title: str, description: str) -> board.Panel:
    built = panel.build()
    built.title, built.description, built.datasource = title, description, SOURCE
    return built


def _thresholds(steps: Steps) -> dashboard.ThresholdsConfig:
    values = [board.Threshold(value, color) for value, color in steps]
    return dashboard.ThresholdsConfig().mode(board.ThresholdsMode.ABSOLUTE).steps(values)


def _coloring(mode: board.FieldColorModeId) -> dashboard.FieldColor:
    return dashboard.FieldColor().mode(mode)


def _fixed(color: str) -> board.DynamicConfigValue:
    return board.DynamicConfigValue("color", {"mode": "fixed", "fixedColor": color})


def _last() -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs(["lastNotNull"]).values(False).fields("")  # noqa: FBT003 - the SDK has it so
