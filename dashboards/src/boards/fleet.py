"""``fleet.json``: scheduled and started events, what came of them, and who says nothing."""

from typing import Final

from grafana_foundation_sdk.models.dashboard import Panel

from boards import parts, queries
from boards.parts import AGE, COUNTDOWN, NONE_IS_CALM, NONE_IS_GOOD, Column, now, over_time, rows
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
LATENCY: Final = "notbefore_delivery_latency_seconds"


def build() -> str:
    """The dashboard as JSON."""
    panels = parts.grid(
        (3, [(4, panel) for panel in (*_events(), *_agents())]),
        (8, [(16, _coming()), (8, _failing())]),
        (7, [(7, _by_type()), (7, _notices()), (10, _notice_by_type())]),
        (7, [(7, _interruptions()), (4, _outcomes()), (4, _approvals()), (9, _notifications())]),
    )
    return parts.dashboard_json(
        "notbefore-fleet",
        "Azure Scheduled Events: the fleet",
        "What Azure is about to do to the VMs, with how much notice, what came of it, and which"
        " agents are silent.",
        panels,
        time="24h",
    )


def _events() -> list[Panel]:
    upcoming = 'azure_scheduled_events_next_not_before_timestamp_seconds{scope!="peer"}'
    return [
        parts.stat_panel(
            "Next NotBefore",
            "Time until the first of the events that hit a chosen VM may start.",
            "dtdhms",
            now(f"clamp_min(min({chosen(upcoming)}) - time(), 0)"),
            COUNTDOWN,
            none="nothing scheduled",
        ),
        parts.stat_panel(
            "VMs affected now",
            "VMs that are in the Resources of a listed event, and have an agent; also one that is"
            " down by now.",
            "short",
            now(counted(f"group by (job, instance) ({queries.chosen_hits()})")),
            NONE_IS_CALM,
        ),
        parts.stat_panel(
            "Events listed now",
            "Each event counts once, however many VMs report it.",
            "short",
            now(counted(queries.known())),
            NONE_IS_CALM,
        ),
        parts.stat_panel(
            "Started now",
            "Events that are going on: Azure has started them, and has not ended them yet.",
            "short",
            now(counted(queries.known_started())),
            NONE_IS_GOOD,
        ),
    ]


def _agents() -> list[Panel]:
    waiting = chosen("notbefore_outbox_oldest_pending_seconds")
    return [
        parts.stat_panel(
            "Silent or failing agents",
            "Agents that cannot be scraped, are gone, or get no answer of IMDS: nobody watches for"
            " those VMs.",
            "short",
            now(queries.failing_agents()),
            NONE_IS_GOOD,
        ),
        parts.stat_panel(
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
    asked = [
        rows(f"{listed()} * on (event_id) group_left () {resources}", "resources"),
        rows(f"{queries.coming()} * on (event_id) group_left () {due}", "countdown"),
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
    return parts.table_panel(
        "Scheduled and started events",
        "The listed events that hit a chosen VM, also one that is down by now. Notice: from the"
        " first sight to NotBefore, where the beginning was seen. Expected: the interruption that"
        " Azure announces. VMs: all that the event affects.",
        asked,
        columns,
        none="nothing scheduled",
        links={"VM": parts.vm_link("VM")},
        sort="May start in",
    )


def _failing() -> Panel:
    return parts.table_panel(
        "Silent or failing agents",
        "Agents that cannot be scraped, or left the scrape in the last hour (as a VM does that was"
        f" deleted), or got no good answer of IMDS for {STALE} s or ever, or cannot write their"
        " state; and how long ago the last good poll was (else the start), looking back"
        f" {queries.LONG}. One that never said who it is stands here whatever the variables say.",
        [rows(queries.failing(), "age")],
        [
            Column("name", "VM", width=95),
            Column("instance", "Instance", width=150),
            Column("problem", "Problem"),
            Column("Value", "Since", "s", steps=AGE, width=90, nan="never"),
        ],
        none="all agents are well",
        links={"VM": parts.vm_link("VM")},
    )


def _by_type() -> Panel:
    return parts.lines_panel(
        "Events by type",
        "Events that were listed, by type. Each counts once, however many VMs report it.",
        "short",
        over_time(f"count by (event_type) ({events(by='event_id, event_type')})", "{{event_type}}"),
        stacked=True,
        points=200,
    )


def _notices() -> Panel:
    return parts.heatmap_panel(
        "Notice that Azure gave",
        "How long before NotBefore events were first seen. A scale set counts once, since its VMs"
        " tell of the same events; so does each other VM.",
        "s",
        queries.notice_buckets(),
    )


def _notice_by_type() -> Panel:
    enough = f"(({queries.promised()}) - {queries.GRACE})"
    asked = [
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
    return parts.table_panel(
        "Notice: promised and given",
        "By type, of the events in the time range whose beginning was seen, each once. 10 %: nine"
        " of ten had more. Kept: the share with at least the notice that Azure promises, less"
        f" {queries.GRACE} s for rounding and polling. Of a Terminate the promise is the least that"
        " can be configured.",
        asked,
        columns,
    )


def _interruptions() -> Panel:
    created = f"{INTERRUPTION}_created"
    hits = queries.grown_by("event_type", f"{INTERRUPTION}_count", created)
    asked = [
        rows(
            "avg by (event_type)"
            f" ({each_event('azure_scheduled_event_expected_interruption_seconds')})",
            "expected",
        ),
        rows(hits, "hits"),
        rows(
            f"{queries.grown_by('event_type', f'{INTERRUPTION}_sum', created)} / ({hits} > 0)",
            "mean",
        ),
        rows(quantile_by("event_type", 0.95, INTERRUPTION, created), "p95"),
    ]
    columns = [
        Column("event_type", "Type"),
        Column("Value #expected", "Expected", "s", decimals=1),
        Column("Value #hits", "Count", "short", decimals=0),
        Column("Value #mean", "Mean", "s", decimals=1),
        Column("Value #p95", "95 %", "s", decimals=1),
    ]
    return parts.table_panel(
        "Interruption: expected and measured",
        "Expected: the mean DurationInSeconds of the events in the time range that have one. Count:"
        " how often a VM could measure how long it stood still. Then the mean of that, and the 95th"
        " percentile.",
        asked,
        columns,
    )


def _outcomes() -> Panel:
    ends = 'azure_scheduled_event_changes_total{change=~"finished|canceled|ended"}'
    return parts.bars_panel(
        "How they ended",
        "Ends of events in the time range, one for each VM that was hit: an agent counts, and has"
        " no event_id to be counted by. `ended`: gone, and nobody watched how.",
        "short",
        now(
            queries.grown_by("change", ends, "azure_scheduled_event_changes_created"), "{{change}}"
        ),
    )


def _approvals() -> Panel:
    return parts.bars_panel(
        "Approvals",
        "What the approval rules came to in the time range, by rule; nothing where approval is not"
        " enabled.",
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

    asked = [
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
    return parts.table_panel(
        "Notifications",
        "By sink, in the time range: accepted by the receiver; attempts that failed and are"
        " repeated; lost: refused for good, expired or pushed out; waiting now; and the time from"
        " the change to its acceptance.",
        asked,
        columns,
        none="no sink is configured",
    )
