"""``fleet.json``: scheduled and started events, their ends, and silent agents."""

from typing import Final

from grafana_foundation_sdk.models.dashboard import Panel

from boards import frame, panels, queries
from boards.panels import (
    AGE,
    COUNTDOWN,
    NONE_IS_CALM,
    NONE_IS_GOOD,
    Column,
    now,
    over_time,
    rows,
)
from boards.queries import (
    STALE,
    chosen,
    counted,
    each_event,
    events,
    increase_by,
    listed,
    of_event,
    quantile_by,
)

NOTICE: Final = each_event("azure_scheduled_event_current_notice_seconds")
KEPT: Final = ((None, "text"), (0, "red"), (0.9, "yellow"), (1, "green"))
INTERRUPTION: Final = "azure_scheduled_event_measured_interruption_seconds"
SCHEDULED_DURATION: Final = "azure_scheduled_event_scheduled_duration_seconds"
STARTED_DURATION: Final = "azure_scheduled_event_started_duration_seconds"
LATENCY: Final = "notbefore_delivery_latency_seconds"


def build() -> str:
    """Return the dashboard as JSON."""
    figures = [(4, panel) for panel in (*_events(), *_agents())]
    grid = frame.grid(
        (3, figures),
        (8, [(16, _coming()), (8, _failing())]),
        (7, [(7, _by_type()), (7, _notices()), (10, _notice_by_type())]),
        (7, [(9, _durations()), (3, _outcomes()), (3, _approvals()), (9, _notifications())]),
    )
    return frame.dashboard_json(
        "notbefore-fleet",
        "Azure Scheduled Events: the fleet",
        "Scheduled and started events of the VMs, their notice, their ends, and silent agents.",
        grid,
        time="24h",
    )


def _events() -> list[Panel]:
    upcoming = 'azure_scheduled_events_next_not_before_timestamp_seconds{scope!="peer"}'
    return [
        panels.stat_panel(
            "Next NotBefore",
            "Time until the first of the events that affect a chosen VM may start.",
            "dtdhms",
            now(f"clamp_min(min({chosen(upcoming)}) - time(), 0)"),
            COUNTDOWN,
            none="nothing scheduled",
        ),
        panels.stat_panel(
            "VMs affected now",
            "VMs with an agent that are in the Resources of a listed event; also VMs that are down"
            " now.",
            "short",
            now(counted(f"group by (job, instance) ({queries.chosen_hits()})")),
            NONE_IS_CALM,
        ),
        panels.stat_panel(
            "Events listed now",
            "Each event counts once, however many VMs report it.",
            "short",
            now(counted(queries.current_events())),
            NONE_IS_CALM,
        ),
        panels.stat_panel(
            "Started now",
            "Events that have started and are not over.",
            "short",
            now(counted(queries.current_started_events())),
            NONE_IS_GOOD,
        ),
    ]


def _agents() -> list[Panel]:
    waiting = chosen("notbefore_outbox_oldest_pending_seconds")
    return [
        panels.stat_panel(
            "Silent or failing agents",
            "Agents that cannot be scraped, are gone, or get no answer from IMDS: their VMs are not"
            " watched.",
            "short",
            now(queries.failing_agents()),
            NONE_IS_GOOD,
        ),
        panels.stat_panel(
            "Oldest waiting notification",
            "Age of the oldest notification that its receiver has not accepted yet.",
            "s",
            now(f"max({waiting}) or vector(0)"),
            ((None, "green"), (60, "yellow"), (300, "red")),
        ),
    ]


def _coming() -> Panel:
    due = f"clamp_min({of_event('azure_scheduled_event_not_before_timestamp_seconds')} - time(), 0)"
    notice = of_event("azure_scheduled_event_current_notice_seconds")
    expected = of_event("azure_scheduled_event_expected_interruption_seconds")
    resources = of_event("azure_scheduled_event_resources")
    table_queries = [
        rows(f"{listed()} * on (event_id) group_left () {resources}", "resources"),
        rows(f"{queries.not_started()} * on (event_id) group_left () {due}", "countdown"),
        rows(f"{listed()} * on (event_id) group_left () {notice}", "notice"),
        rows(f"{listed()} * on (event_id) group_left () {expected}", "expected"),
    ]
    columns = [
        Column("name", "VM", width=150),
        Column("event_type", "Type", width=90),
        Column("event_status", "Status", width=90),
        Column("event_source", "Source", width=80),
        Column("Value #countdown", "May start in", "dtdhms", steps=COUNTDOWN, width=120),
        Column("Value #notice", "Notice", "s", width=90, decimals=1),
        Column("Value #expected", "Expected", "s", width=85, decimals=0),
        Column("Value #resources", "VMs", "short", width=55),
        Column("description", "Description"),
    ]
    return panels.table_panel(
        "Scheduled and started events",
        "The listed events that affect a chosen VM, also a VM that is down now. Notice: from the"
        " first sight to NotBefore, if the beginning was seen. Expected: the interruption that"
        " Azure announces. VMs: all VMs that the event affects.",
        table_queries,
        columns,
        none="nothing scheduled",
        links={"VM": frame.vm_link("VM")},
        sort="May start in",
    )


def _failing() -> Panel:
    return panels.table_panel(
        "Silent or failing agents",
        "Agents that cannot be scraped, or left the scrape in the last hour (as a deleted VM does),"
        f" or got no good answer from IMDS for {STALE} s or ever, or cannot write their state. The"
        f" time since the last good poll of the last {queries.LONG}, else since the start. An agent"
        " whose VM is unknown is shown whatever the variables choose.",
        [rows(queries.failing(), "age")],
        [
            Column("name", "VM", width=95),
            Column("instance", "Instance", width=150),
            Column("problem", "Problem"),
            Column("Value", "Since", "s", steps=AGE, width=90, nan="never"),
        ],
        none="all agents are well",
        links={"VM": frame.vm_link("VM")},
    )


def _by_type() -> Panel:
    return panels.lines_panel(
        "Events by type",
        "Events that were listed, by type. Each counts once, however many VMs report it.",
        "short",
        over_time(f"count by (event_type) ({events(by='event_id, event_type')})", "{{event_type}}"),
        stacked=True,
        points=200,
    )


def _notices() -> Panel:
    return panels.heatmap_panel(
        "Notice that Azure gave",
        "How long before NotBefore events were first seen. A scale set counts once, because its VMs"
        " report the same events. Any other VM counts by itself.",
        "s",
        queries.notice_buckets(),
    )


def _notice_by_type() -> Panel:
    enough = f"(({queries.promised()}) - {queries.GRACE})"
    table_queries = [
        rows(queries.promised(), "promised"),
        rows(f"count by (event_type) ({NOTICE}) or 0 * ({queries.promised()})", "events"),
        rows(f"min by (event_type) ({NOTICE})", "shortest"),
        rows(f"quantile by (event_type) (0.1, {NOTICE})", "p10"),
        rows(f"quantile by (event_type) (0.5, {NOTICE})", "p50"),
        rows(
            f"avg by (event_type) (({NOTICE}) >= bool on (event_type) group_left () {enough})",
            "kept",
        ),
    ]
    columns = [
        Column("event_type", "Type"),
        Column("Value #events", "Events", "short", decimals=0, width=70),
        Column("Value #promised", "Promised", "s", decimals=1),
        Column("Value #shortest", "Shortest", "s", decimals=1),
        Column("Value #p10", "10 %", "s", decimals=1),
        Column("Value #p50", "Median", "s", decimals=1),
        Column("Value #kept", "Kept", "percentunit", decimals=0, width=65, steps=KEPT),
    ]
    return panels.table_panel(
        "Notice: promised and given",
        "By type, of the events in the time range whose beginning was seen, each once. 10 %: nine"
        " of ten had more. Kept: the share with at least the notice that Azure promises, less"
        f" {queries.GRACE} s for rounding and polling. For Terminate, the promise is the shortest"
        " notice that can be configured.",
        table_queries,
        columns,
    )


def _durations() -> Panel:
    created = f"{INTERRUPTION}_created"
    hits = queries.grown_by("event_type", f"{INTERRUPTION}_count", created)
    table_queries = [
        rows(_mean_by_type(SCHEDULED_DURATION), "scheduled"),
        rows(_mean_by_type(STARTED_DURATION), "started"),
        rows(
            "avg by (event_type)"
            f" ({each_event('azure_scheduled_event_expected_interruption_seconds')})",
            "expected",
        ),
        rows(hits, "hits"),
        rows(_mean_by_type(INTERRUPTION), "mean"),
        rows(quantile_by("event_type", 0.95, INTERRUPTION, created), "p95"),
    ]
    columns = [
        Column("event_type", "Type"),
        Column("Value #scheduled", "Scheduled", "s", decimals=1),
        Column("Value #started", "Started", "s", decimals=1),
        Column("Value #expected", "Expected", "s", decimals=1),
        Column("Value #hits", "Count", "short", decimals=0, width=60),
        Column("Value #mean", "Mean", "s", decimals=1),
        Column("Value #p95", "95 %", "s", decimals=1),
    ]
    return panels.table_panel(
        "Durations and interruptions",
        "Scheduled: the mean time from the first sight of an event to its start. Started: that from"
        " its start to its end. Both count an event once for each VM that saw both moments."
        " Expected: the mean DurationInSeconds of the events in the time range that have one."
        " Count: interruptions that VMs measured, with their mean and 95th percentile.",
        table_queries,
        columns,
    )


def _mean_by_type(histogram: str) -> str:
    created = f"{histogram}_created"
    total = queries.grown_by("event_type", f"{histogram}_sum", created)
    count = queries.grown_by("event_type", f"{histogram}_count", created)
    return f"{total} / ({count} > 0)"


def _outcomes() -> Panel:
    ends = 'azure_scheduled_event_changes_total{change=~"finished|canceled|ended"}'
    return panels.bars_panel(
        "How they ended",
        "Ends of events in the time range, one for each affected VM: the agents' counters have no"
        " event_id. `ended`: the event is gone, and no agent saw how.",
        "short",
        now(
            queries.grown_by("change", ends, "azure_scheduled_event_changes_created"), "{{change}}"
        ),
    )


def _approvals() -> Panel:
    return panels.bars_panel(
        "Approvals",
        "Results of the approval rules in the time range; none if approval is not enabled.",
        "short",
        now(
            queries.grown_by(
                "rule, result",
                "azure_scheduled_event_approvals_total",
                "azure_scheduled_event_approvals_created",
            ),
            "{{rule}}: {{result}}",
        ),
    )


def _notifications() -> Panel:
    waiting = chosen('notbefore_outbox_deliveries{state="pending"}')

    def deliveries(results: str) -> str:
        return increase_by("sink", f'notbefore_deliveries_total{{result=~"{results}"}}')

    table_queries = [
        rows(deliveries("delivered"), "delivered"),
        rows(deliveries("failed"), "failed"),
        rows(deliveries("dead|expired|overflowed"), "lost"),
        rows(f"sum by (sink) ({waiting})", "waiting"),
        rows(quantile_by("sink", 0.5, LATENCY), "p50"),
        rows(quantile_by("sink", 0.95, LATENCY), "p95"),
    ]
    columns = [
        Column("sink", "Sink"),
        Column("Value #delivered", "Delivered", "short", decimals=0),
        Column(
            "Value #failed", "Retried", "short", decimals=0, steps=((None, "text"), (1, "yellow"))
        ),
        Column("Value #lost", "Lost", "short", decimals=0, steps=((None, "text"), (1, "red"))),
        Column(
            "Value #waiting", "Waiting", "short", decimals=0, steps=((None, "text"), (1, "yellow"))
        ),
        Column("Value #p50", "Median", "s", decimals=1),
        Column("Value #p95", "95 %", "s", decimals=1),
    ]
    return panels.table_panel(
        "Notifications",
        "By sink, in the time range: accepted by the receiver; attempts that failed and are"
        " repeated; lost: refused for good, expired or removed from a full outbox; waiting now; and"
        " the time from the change to its acceptance.",
        table_queries,
        columns,
        none="no sink is configured",
    )
