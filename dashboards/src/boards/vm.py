"""``vm.json``: one VM, with its events as annotations."""

from typing import Final

from grafana_foundation_sdk.models.dashboard import Panel

from boards import frame, panels, queries
from boards.panels import AGE, COUNTDOWN, NONE_IS_CALM, NONE_IS_GOOD, Column, now, over_time, rows
from boards.queries import chosen, counted, increase_by, listed, of_event, quantile_by, rate_by

INTERRUPTION: Final = "azure_scheduled_event_measured_interruption_seconds"
SCHEDULED_DURATION: Final = "azure_scheduled_event_scheduled_duration_seconds"
STARTED_DURATION: Final = "azure_scheduled_event_started_duration_seconds"
BY_EVENT: Final = "event_type, event_id, scope"


def build() -> str:
    """Return the dashboard as JSON."""
    figures = [(4, panel) for panel in _figures()]
    grid = frame.grid(
        (4, [*figures, (8, _identity())]),
        (6, [(14, _listed()), (10, _states())]),
        (7, [(6, _countdown()), (6, _durations()), (6, _interruptions()), (6, _changes())]),
        (7, [(8, _polls()), (8, _delay()), (8, _deliveries())]),
    )
    return frame.dashboard_json(
        "notbefore-vm",
        "Azure Scheduled Events: one VM",
        "Events of one VM and of its group, their measured interruptions, and the health of its"
        " agent.",
        grid,
        time="24h",
        one_vm=True,
    )


def _figures() -> list[Panel]:
    upcoming = 'azure_scheduled_events_next_not_before_timestamp_seconds{scope!="peer"}'
    started_hits = f"{queries.chosen_hits()} and on (event_id) {queries.started()}"
    last_polls = queries.chosen_in_range(f"last_over_time({queries.LAST_POLL}[$__range])")
    return [
        panels.stat_panel(
            "Next NotBefore",
            "Time until the first event that affects this VM may start.",
            "dtdhms",
            now(f"clamp_min(min({chosen(upcoming)}) - time(), 0)"),
            COUNTDOWN,
            none="nothing scheduled",
        ),
        panels.stat_panel(
            "Events that hit it",
            "Listed events with this VM in their Resources.",
            "short",
            now(counted(f"group by (event_id) ({queries.chosen_hits()})")),
            NONE_IS_CALM,
        ),
        panels.stat_panel(
            "Started now",
            "Events of this VM that have started and are not over.",
            "short",
            now(counted(f"group by (event_id) ({started_hits})")),
            NONE_IS_GOOD,
        ),
        panels.stat_panel(
            "Last good poll",
            "Time since IMDS last answered, also for agents that became silent in the range.",
            "s",
            now(f"time() - max({last_polls})"),
            AGE,
            none="never",
        ),
    ]


def _identity() -> Panel:
    columns = [
        Column("location", "Region"),
        Column("zone", "Zone", width=55),
        Column("resource_group", "Group"),
        Column("scale_set", "Scale set"),
        Column("version", "Agent", width=70),
    ]
    shown = "location, zone, resource_group, scale_set, version"
    return panels.table_panel(
        "This VM",
        "Region, zone, resource group and scale set from IMDS, and the agent's version.",
        [
            rows(
                f"group by ({shown}) ({queries.VM} * on (job, instance) group_left (version)"
                " notbefore_build_info)",
                "vm",
            )
        ],
        columns,
        none="not known",
    )


def _listed() -> Panel:
    due = f"clamp_min({of_event('azure_scheduled_event_not_before_timestamp_seconds')} - time(), 0)"
    notice = of_event("azure_scheduled_event_current_notice_seconds")
    expected = of_event("azure_scheduled_event_expected_interruption_seconds")
    table_queries = [
        rows(listed(peers=True), "listed"),
        rows(f"{queries.not_started(peers=True)} * on (event_id) group_left () {due}", "countdown"),
        rows(f"{listed(peers=True)} * on (event_id) group_left () {notice}", "notice"),
        rows(f"{listed(peers=True)} * on (event_id) group_left () {expected}", "expected"),
    ]
    columns = [
        Column("scope", "Hits", width=60),
        Column("event_type", "Type", width=90),
        Column("event_status", "Status", width=90),
        Column("Value #countdown", "May start in", "dtdhms", steps=COUNTDOWN, width=120),
        Column("Value #notice", "Notice", "s", width=90, decimals=1),
        Column("Value #expected", "Expected", "s", width=85, decimals=0),
        Column("description", "Description"),
    ]
    return panels.table_panel(
        "Listed now",
        "Events that this VM lists: those that affect it (self), and those of other VMs of its"
        " group (peer).",
        table_queries,
        columns,
        none="nothing scheduled",
        sort="May start in",
    )


def _states() -> Panel:
    scheduled = chosen(f'{queries.INFO}{{event_status="Scheduled"}}')
    started = chosen(f'{queries.INFO}{{event_status="Started"}}')
    return panels.timeline_panel(
        "Events over time",
        "When each event was scheduled and started, as this VM saw it.",
        {"1": ("Scheduled", "yellow"), "2": ("Started", "red")},
        over_time(
            f"max by ({BY_EVENT}) ({scheduled}) or 2 * max by ({BY_EVENT}) ({started})",
            "{{event_type}} ({{scope}})",
        ),
    )


def _countdown() -> Panel:
    left = chosen("azure_scheduled_event_seconds_to_not_before")
    types = f"max by ({BY_EVENT}) ({chosen(queries.INFO)})"
    return panels.lines_panel(
        "Time to NotBefore",
        "The countdown of the next event of each type. A step up is a postponed NotBefore, or the"
        " next event.",
        "s",
        over_time(
            f"min by (event_type, scope) ({types} * on (event_id) group_left () max by (event_id)"
            f" ({left}))",
            "{{event_type}} ({{scope}})",
        ),
    )


def _durations() -> Panel:
    return panels.lines_panel(
        "How long events lasted",
        "Scheduled: from the first sight of an event to its start, shown at the start. Started:"
        " from its start to its end, shown at the end. Also of events of other VMs.",
        "s",
        over_time(_mean_by_type(SCHEDULED_DURATION), "scheduled, {{event_type}}", "scheduled"),
        over_time(_mean_by_type(STARTED_DURATION), "started, {{event_type}}", "started"),
        dots=True,
        points=200,
    )


def _mean_by_type(histogram: str) -> str:
    """Return the mean of the observations in a window, by event type."""
    created = f"{histogram}_created"
    total = queries.growth_by("event_type", f"{histogram}_sum", created)
    count = queries.growth_by("event_type", f"{histogram}_count", created)
    # increase() extrapolates, which the quotient cancels
    return f"{total} / ({count} > 0)"


def _interruptions() -> Panel:
    hits = f'{queries.INFO}{{scope="self"}}'
    expected = chosen(
        "azure_scheduled_event_expected_interruption_seconds and on (job, instance, event_id)"
        f" {hits}"
    )
    return panels.lines_panel(
        "Interruption: expected and measured",
        "Measured: interruption of the VM by each event, in seconds, at the end of the event."
        " Expected: DurationInSeconds of the events that affect it, while they are listed.",
        "s",
        over_time(_mean_by_type(INTERRUPTION), "measured, {{event_type}}", "measured"),
        over_time(f"max({expected})", "expected", "expected"),
        dots=True,
        points=200,
    )


def _changes() -> Panel:
    changes = queries.growth_by(
        "change", "azure_scheduled_event_changes_total", "azure_scheduled_event_changes_created"
    )
    return panels.lines_panel(
        "Changes",
        "Changes of the events that affect this VM. `ended`: the event is gone, and no agent saw"
        " how.",
        "short",
        over_time(f"{changes} > 0", "{{change}}"),
        stacked=True,
        points=200,
    )


def _polls() -> Panel:
    buckets = rate_by("le", "notbefore_poll_duration_seconds_bucket")
    return panels.lines_panel(
        "Answers of IMDS",
        "Time from a request to the end of IMDS's answer, also of an error.",
        "s",
        over_time(f"histogram_quantile(0.5, {buckets})", "median", "p50"),
        over_time(f"histogram_quantile(0.99, {buckets})", "99 %", "p99"),
    )


def _delay() -> Panel:
    return panels.lines_panel(
        "Delay of polls",
        "How late a poll began. A frozen VM is visible here too.",
        "s",
        over_time(f"max({chosen('notbefore_poll_delay_seconds')})", "delay"),
    )


def _deliveries() -> Panel:
    def deliveries(results: str) -> str:
        return increase_by("sink", f'notbefore_deliveries_total{{result=~"{results}"}}')

    table_queries = [
        rows(deliveries("delivered"), "delivered"),
        rows(deliveries("failed"), "failed"),
        rows(deliveries("dead|expired|overflowed"), "lost"),
        rows(f"max by (sink) ({chosen('notbefore_outbox_oldest_pending_seconds')})", "oldest"),
        rows(quantile_by("sink", 0.95, "notbefore_delivery_latency_seconds"), "p95"),
    ]
    columns = [
        Column("sink", "Sink"),
        Column("Value #delivered", "Delivered", "short", decimals=0),
        Column(
            "Value #failed", "Retried", "short", decimals=0, steps=((None, "text"), (1, "yellow"))
        ),
        Column("Value #lost", "Lost", "short", decimals=0, steps=((None, "text"), (1, "red"))),
        Column(
            "Value #oldest", "Oldest", "s", steps=((None, "text"), (60, "yellow"), (300, "red"))
        ),
        Column("Value #p95", "95 %", "s", decimals=1),
    ]
    return panels.table_panel(
        "Notifications of this VM",
        "By sink, in the time range: accepted by the receiver; attempts that failed and are"
        " repeated; lost: refused for good, expired or removed from a full outbox; the age of the"
        " oldest that waits; and the time from the change to its acceptance.",
        table_queries,
        columns,
        none="no sink is configured",
    )
