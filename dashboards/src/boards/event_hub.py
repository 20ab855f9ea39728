"""``event-hub.json``: the fleet as ``notbefore fleet`` reads it from the Event Hub, and its
instances.

Each instance has metrics of the partitions that it reads, so a sum over all instances is the fleet.
"""

from typing import Final

from grafana_foundation_sdk.models.dashboard import Panel

from boards import frame, panels
from boards.frame import Annotation, Variable
from boards.panels import GOOD, NONE_IS_CALM, NONE_IS_GOOD, Column, now, over_time, rows
from boards.queries import INTERVAL, RANGE

PLACE: Final = 'job=~"$job", region=~"$region", scale_set=~"$scale_set"'
REGION: Final = 'job=~"$job", region=~"$region"'
JOB: Final = 'job=~"$job"'
BY_PLACE: Final = "event_type, event_status, region, scale_set, zone"
LATE: Final = ((None, "green"), (5, "yellow"), (30, "red"))
VARIABLES: Final = (
    Variable("job", "Fleet", "label_values(notbefore_fleet_partitions, job)"),
    Variable("region", "Region", f"label_values(notbefore_fleet_vms_heard{{{JOB}}}, region)"),
    Variable(
        "scale_set", "Scale set", f"label_values(notbefore_fleet_vms_heard{{{REGION}}}, scale_set)"
    ),
)


def build() -> str:
    """Return the dashboard as JSON."""
    figures_of_vms = [(4, panel) for panel in _figures_of_vms()]
    figures_of_sources = [(4, panel) for panel in _figures_of_sources()]
    grid = frame.grid(
        (3, figures_of_vms),
        (3, figures_of_sources),
        (7, [(14, _coming()), (10, _heard())]),
        (6, [(6, _by_type()), (6, _silent()), (6, _lag_seconds()), (6, _lag_records())]),
        (
            7,
            [
                (6, _azure_messages()),
                (3, _first_notices()),
                (3, _ends()),
                (6, _records()),
                (6, _instances()),
            ],
        ),
    )
    return frame.dashboard_json(
        "notbefore-event-hub",
        "Azure Scheduled Events: the fleet by Event Hub",
        "The events that VMs and Azure report to the hub, the affected VMs, silent VMs, and how"
        " late the hub is read.",
        grid,
        time="24h",
        variables=VARIABLES,
        annotations=(
            _annotation("Announced", "scheduled", "yellow"),
            _annotation("Started", "started", "red"),
        ),
    )


def _annotation(name: str, status: str, color: str) -> Annotation:
    expr = (
        "sum by (event_type, region, scale_set)"
        f' (notbefore_fleet_events_pending{{event_status="{status}", {PLACE}}})'
    )
    return Annotation(name, color, expr, "{{scale_set}} {{region}}", "event_type,scale_set")


def _sum(metric: str, selector: str = PLACE, by: str = "") -> str:
    if by:
        return f"sum by ({by}) ({metric}{{{selector}}})"
    return f"sum({metric}{{{selector}}})"


def _grown(metric: str, window: str, by: str = "") -> str:
    """Return by how much a counter of all instances grew.

    The counters of an instance begin at 0 with its start. So a series without a sample before the
    window grew by its whole value.
    """
    series = f"{metric}{{{JOB}}}"
    new = f"last_over_time({series}[{window}]) unless {series} offset {window}"
    growth = f"({new} or increase({series}[{window}]))"
    if by:
        return f"sum by ({by}) {growth}"
    return f"sum {growth}"


def _figures_of_vms() -> list[Panel]:
    started = f'event_status="started", {PLACE}'
    return [
        panels.stat_panel(
            "Events",
            "Events that are scheduled or have started, each once, however many VMs report it.",
            "short",
            now(f"{_sum('notbefore_fleet_events_pending')} or vector(0)"),
            NONE_IS_CALM,
        ),
        panels.stat_panel(
            "VMs affected",
            "VMs that these events affect; one that two events affect counts twice.",
            "short",
            now(f"{_sum('notbefore_fleet_vms_affected')} or vector(0)"),
            NONE_IS_CALM,
        ),
        panels.stat_panel(
            "Started",
            "Events that have started and are not over.",
            "short",
            now(f"{_sum('notbefore_fleet_events_pending', started)} or vector(0)"),
            NONE_IS_GOOD,
        ),
        panels.stat_panel(
            "VMs heard from",
            "VMs that send heartbeats, the silent ones included.",
            "short",
            now(_sum("notbefore_fleet_vms_heard")),
            GOOD,
        ),
        panels.stat_panel(
            "Silent VMs",
            "VMs without a heartbeat for three of their intervals, without an event that explains"
            " it.",
            "short",
            now(_sum("notbefore_fleet_vms_silent")),
            NONE_IS_GOOD,
        ),
        panels.stat_panel(
            "Lag",
            "Age of the oldest record that is still to be read, over all partitions.",
            "s",
            now(f"max(notbefore_fleet_lag_seconds{{{JOB}}})"),
            LATE,
            decimals=1,
        ),
    ]


def _figures_of_sources() -> list[Panel]:
    buckets = _grown("notbefore_fleet_azure_delay_seconds_bucket", RANGE, "le")
    contradictions = _grown("notbefore_fleet_contradictions_total", RANGE)
    unused = _grown("notbefore_fleet_poison_records_total", RANGE)
    return [
        panels.stat_panel(
            "Events in two partitions",
            "Events that are open in two partitions, such as Azure's messages in one, and the VMs'"
            " records in the other. Each partition notifies of them.",
            "short",
            now(_sum("notbefore_fleet_events_split", JOB)),
            NONE_IS_GOOD,
        ),
        panels.stat_panel(
            "Events not reported",
            "Events that VMs list in their heartbeats, but that no VM has reported. No one is"
            " notified of them.",
            "short",
            now(_sum("notbefore_fleet_events_unknown", JOB)),
            NONE_IS_GOOD,
        ),
        panels.stat_panel(
            "VMs without an agent",
            "VMs of Azure's messages in the last 30 days that have reported nothing themselves.",
            "short",
            now(_sum("notbefore_fleet_vms_without_agent", JOB)),
            NONE_IS_CALM,
        ),
        panels.stat_panel(
            "Delay of Azure's messages",
            "From the eventTime of Azure's messages to their arrival in the hub: 95 % of those in"
            " the time range were faster.",
            "s",
            now(f"histogram_quantile(0.95, {buckets}) >= 0"),
            ((None, "green"), (60, "yellow"), (600, "red")),
            none="no messages",
            decimals=1,
        ),
        panels.stat_panel(
            "Contradictions",
            "Events in the time range that Azure reported as Canceled after their start was seen.",
            "short",
            now(contradictions),
            NONE_IS_CALM,
        ),
        panels.stat_panel(
            "Unused records",
            "Records and messages in the time range that could not be read. The log of the"
            " instance names them.",
            "short",
            now(f"{unused} or vector(0)"),
            NONE_IS_GOOD,
        ),
    ]


def _coming() -> Panel:
    vms = f"sum by (event_type, region, scale_set, zone) (notbefore_fleet_vms_affected{{{PLACE}}})"
    labels = "event_type, region, scale_set, zone"
    events = _sum("notbefore_fleet_events_pending", by=BY_PLACE)
    table_queries = [
        rows(events, "events"),
        rows(f"0 * ({events}) + on ({labels}) group_left () {vms}", "vms"),
    ]
    columns = [
        Column("event_type", "Type", width=100),
        Column("event_status", "Status", width=100),
        Column("region", "Region"),
        Column("scale_set", "Scale set"),
        Column("zone", "Zone", width=60),
        Column("Value #events", "Events", "short", decimals=0, width=70),
        Column("Value #vms", "VMs", "short", decimals=0, width=70),
    ]
    return panels.table_panel(
        "Scheduled and started events",
        "Events that are not over, by type and place. VMs: those that all events of this type and"
        " place affect, whatever their status.",
        table_queries,
        columns,
        none="nothing scheduled",
    )


def _heard() -> Panel:
    by = "region, scale_set"
    table_queries = [
        rows(_sum("notbefore_fleet_vms_heard", by=by), "heard"),
        rows(_sum("notbefore_fleet_vms_silent", by=by), "silent"),
    ]
    columns = [
        Column("region", "Region"),
        Column("scale_set", "Scale set"),
        Column("Value #heard", "Heard from", "short", decimals=0, width=95),
        Column(
            "Value #silent",
            "Silent",
            "short",
            decimals=0,
            width=70,
            steps=((None, "text"), (1, "red")),
        ),
    ]
    return panels.table_panel(
        "VMs heard from",
        "By region and scale set: VMs that send heartbeats, and those of them that are silent now."
        " `/api/v1/fleet/events` has their names.",
        table_queries,
        columns,
        none="no heartbeats",
    )


def _by_type() -> Panel:
    return panels.lines_panel(
        "Events by type",
        "Events that are not over, by type.",
        "short",
        over_time(_sum("notbefore_fleet_events_pending", by="event_type"), "{{event_type}}"),
        stacked=True,
        points=200,
    )


def _silent() -> Panel:
    return panels.lines_panel(
        "Silent VMs by scale set",
        "VMs whose heartbeats have stopped without an event that explains it.",
        "short",
        over_time(
            _sum("notbefore_fleet_vms_silent", by="region, scale_set") + " > 0",
            "{{region}} {{scale_set}}",
        ),
        stacked=True,
        points=200,
    )


def _lag_seconds() -> Panel:
    return _lag("seconds", "Age of the next record to be read, by partition.", "s")


def _lag_records() -> Panel:
    return _lag("records", "Records that are still to be read, by partition.", "short")


def _lag(measure: str, description: str, unit: str) -> Panel:
    return panels.lines_panel(
        f"Lag in {measure}",
        description,
        unit,
        over_time(
            f"max by (job, partition) (notbefore_fleet_lag_{measure}{{{JOB}}})",
            "{{job}} {{partition}}",
        ),
    )


def _azure_messages() -> Panel:
    messages = _grown("notbefore_fleet_azure_messages_total", INTERVAL, "event_status")
    return panels.lines_panel(
        "Azure's messages",
        "Messages of Event Grid about scheduled events, by EventStatus. skipped: about other"
        " things, such as upgrades of AKS clusters.",
        "short",
        over_time(f"{messages} > 0", "{{event_status}}"),
        stacked=True,
        points=100,
    )


def _first_notices() -> Panel:
    return panels.bars_panel(
        "First reported by",
        "Events in the time range, by who reported them first: Azure's message, or the agent of a"
        " VM.",
        "short",
        now(_grown("notbefore_fleet_first_notices_total", RANGE, "source"), "{{source}}"),
    )


def _ends() -> Panel:
    return panels.bars_panel(
        "End known by",
        "Ends of events in the time range, by who knew how they ended. A correction counts again.",
        "short",
        now(_grown("notbefore_fleet_ends_total", RANGE, "known_by"), "{{known_by}}"),
    )


def _records() -> Panel:
    errors = _grown("notbefore_fleet_errors_total", INTERVAL, "part")
    unused = _grown("notbefore_fleet_poison_records_total", INTERVAL, "reason")
    return panels.lines_panel(
        "Records and errors",
        "Records read per second, by result: news changed an event, beat is a heartbeat, poison"
        " was not used. Unused records by reason. And errors, by their origin, such as the hub or"
        " the checkpoint store.",
        "short",
        over_time(
            f"sum by (result) (rate(notbefore_fleet_records_total{{{JOB}}}[{INTERVAL}]))",
            "{{result}}/s",
            "records",
        ),
        over_time(f"{unused} > 0", "unused: {{reason}}", "unused"),
        over_time(f"{errors} > 0", "errors: {{part}}", "errors"),
    )


def _instances() -> Panel:
    by = "job, instance"
    dead = f'sum by ({by}) (notbefore_outbox_deliveries{{state="dead", {JOB}}})'
    waiting = f"max by ({by}) (notbefore_outbox_oldest_pending_seconds{{{JOB}}})"
    partitions = f"max by ({by}) (notbefore_fleet_partitions{{{JOB}}})"
    table_queries = [
        rows(partitions, "partitions"),
        # an instance without waiting notifications has no such series
        rows(f"({waiting} or 0 * {partitions}) and on ({by}) {partitions}", "waiting"),
        rows(f"({dead} or 0 * {partitions}) and on ({by}) {partitions}", "dead"),
        rows(
            f"max by ({by}) (process_resident_memory_bytes{{{JOB}}}) and on ({by}) {partitions}",
            "memory",
        ),
    ]
    columns = [
        Column("instance", "Instance"),
        Column("Value #partitions", "Partitions", "short", decimals=0, width=80),
        Column("Value #waiting", "Waiting", "s", decimals=0, width=75),
        Column(
            "Value #dead", "Dead", "short", decimals=0, width=55, steps=((None, "text"), (1, "red"))
        ),
        Column("Value #memory", "Memory", "bytes", decimals=0, width=80),
    ]
    return panels.table_panel(
        "Instances",
        "By instance: partitions that it reads; age of the oldest notification that waits for its"
        " receiver; refused notifications, which need an operator; resident memory.",
        table_queries,
        columns,
        none="no instance is scraped",
    )
