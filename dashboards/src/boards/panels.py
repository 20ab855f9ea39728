"""The kinds of panels, with their queries, columns and colors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

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
from grafana_foundation_sdk.models import common as models
from grafana_foundation_sdk.models import dashboard as board
from grafana_foundation_sdk.models import heatmap as heat
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from notbefore.core.routing import NEAR

SOURCE: Final = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
# event types and changes -> names of Grafana's palette, of which each theme has its own shades
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

# (value, the color from this value on); the first has no value
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
    """A column of a table."""

    field: str  # the label, or ``Value #REF`` for the value of a query
    title: str
    unit: str = ""
    steps: Steps = ()
    width: int = 0  # pixels; 0: the rest of the width
    decimals: int | None = None
    nan: str = ""  # the text for NaN

    def properties(self) -> list[board.DynamicConfigValue]:
        """Return Grafana's overrides for this column."""
        overrides: dict[str, object] = {"noValue": "-"}  # of a cell; the panel has its own
        if self.unit:
            overrides["unit"] = self.unit
        if self.decimals is not None:
            overrides["decimals"] = self.decimals
        if self.width:
            overrides["custom.width"] = self.width
        if self.steps:
            overrides["thresholds"] = _thresholds(self.steps).build()
            overrides["custom.cellOptions"] = models.TableColorTextCellOptions()
        if self.nan:
            match = board.DashboardSpecialValueMapOptions(
                match=board.SpecialValueMatch.NA_N,
                result=board.ValueMappingResult(text=self.nan, color="red"),
            )
            overrides["mappings"] = [board.SpecialValueMap(options=match)]
        return [board.DynamicConfigValue(key, value) for key, value in overrides.items()]


def over_time(expr: str, legend: str, ref: str = "A") -> Query:
    """Return a query for a panel over time."""
    return Query().expr(expr).legend_format(legend).ref_id(ref).range()


def now(expr: str, legend: str = "", ref: str = "A") -> Query:
    """Return a query for a panel of one moment."""
    return Query().expr(expr).legend_format(legend).ref_id(ref).instant()


def rows(expr: str, ref: str) -> Query:
    """Return a query whose series are rows of a table; its values are the field ``Value #REF``."""
    return Query().expr(expr).ref_id(ref).instant().format(PromQueryFormat.TABLE)


def stat_panel(
    title: str,
    description: str,
    unit: str,
    query: Query,
    steps: Steps,
    *,
    none: str = "none",
    decimals: int = 0,
) -> board.Panel:
    """Return a panel with one number. ``none``: its text without a value."""
    panel = (
        stat.Panel()
        .with_target(query)
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
    *queries: Query,
    stacked: bool = False,
    dots: bool = False,
    points: int = 0,
) -> board.Panel:
    """Return a panel of series over time, as lines, dots or stacked bars.

    ``points``: how many of them at most; 0: as many as have room.
    """
    panel = lines.Panel().targets(list(queries)).unit(unit).min(0)
    if unit == "short":
        panel.decimals(0)  # there is no half an event
    panel.legend(
        common.VizLegendOptions()
        .show_legend(True)
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
    title: str, description: str, unit: str, query: Query, steps: Steps = GOOD
) -> board.Panel:
    """Return a panel with one bar for each series."""
    panel = (
        bargauge.Panel()
        .with_target(query)
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
    """Return a panel of buckets over time; ``expr`` gives them cumulative, by ``le``."""
    query = over_time(expr, "{{le}}").format(PromQueryFormat.HEATMAP)
    panel = heatmap.Panel().with_target(query).unit(unit).max_data_points(48).hide_legend()
    panel.color(
        heatmap.HeatmapColorOptions()
        .mode(heat.HeatmapColorMode.SCHEME)
        .scheme("Oranges")
        .steps(32)
        .exponent(0.5)
        .fill("dark-orange")
        .reverse(False)
    )
    panel.y_axis(heatmap.YAxisConfig().unit(unit)).cell_gap(1)
    panel.filter_values(heatmap.FilterValueRange().le(1e-9)).show_value(models.VisibilityMode.NEVER)
    panel.tooltip(heatmap.HeatmapTooltip().mode(models.TooltipDisplayMode.SINGLE))
    return _described(panel, title, description)


def table_panel(
    title: str,
    description: str,
    queries: Sequence[Query],
    columns: Sequence[Column],
    *,
    none: str = "none",
    links: Mapping[str, str] | None = None,
    sort: str = "",
) -> board.Panel:
    """Return a table. Rows of several queries with the same labels are one row.

    ``links``: title of a column -> address of its cells. ``sort``: title of a column.
    """
    panel = (
        table.Panel()
        .targets(list(queries))
        .unit("none")
        .no_value(none)
        .cell_height(models.TableCellHeight.SM)
    )
    panel.cell_options(models.TableAutoCellOptions()).min_width(40)
    panel.with_transformation(board.DataTransformerConfig("merge", options={}))
    order = {column.field: index for index, column in enumerate(columns)}
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
        panel.sort_by([common.TableSortByFieldState().display_name(sort).desc(False)])
    return _described(panel, title, description)


def timeline_panel(
    title: str, description: str, states: Mapping[str, tuple[str, str]], query: Query
) -> board.Panel:
    """Return a panel with the states of each series over time.

    ``states``: value -> its name and color.
    """
    panel = (
        statetimeline.Panel()
        .with_target(query)
        .unit("none")
        .row_height(0.8)
        .line_width(0)
        .fill_opacity(80)
    )
    panel.show_value(models.VisibilityMode.AUTO).merge_values(True)
    results = {
        value: board.ValueMappingResult(text=text, color=color)
        for value, (text, color) in states.items()
    }
    panel.mappings([board.ValueMap(results)]).thresholds(_thresholds(PLAIN))
    panel.color_scheme(_coloring(board.FieldColorModeId.THRESHOLDS)).no_value("none")
    panel.legend(
        common.VizLegendOptions()
        .show_legend(False)
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


def _described(panel: Builder[board.Panel], title: str, description: str) -> board.Panel:
    built = panel.build()
    built.title = title
    built.description = description
    built.datasource = SOURCE
    return built


def _thresholds(steps: Steps) -> dashboard.ThresholdsConfig:
    values = [board.Threshold(value, color) for value, color in steps]
    return dashboard.ThresholdsConfig().mode(board.ThresholdsMode.ABSOLUTE).steps(values)


def _coloring(mode: board.FieldColorModeId) -> dashboard.FieldColor:
    return dashboard.FieldColor().mode(mode)


def _fixed(color: str) -> board.DynamicConfigValue:
    return board.DynamicConfigValue("color", {"mode": "fixed", "fixedColor": color})


def _last() -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs(["lastNotNull"]).values(False).fields("")
