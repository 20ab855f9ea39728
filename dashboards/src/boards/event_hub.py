"""``event-hub.json``: what ``notbefore fleet`` reads from the Event Hub, and how its instances
fare.

Each instance shows the partitions that are its own, so sums over all instances are right whichever
has which.
"""

from typing import Final

from grafana_foundation_sdk.models.dashboard import Panel

from boards import parts
from boards.parts import (
    GOOD,
    NONE_IS_CALM,
    NONE_IS_GOOD,
    Annotation,
    Column,
    Variable,
    now,
    over_time,
    rows,
)
from boards.queries import INTERVAL

PLACE: Final = 'job=~"$job", region=~"$region", scale_set=~"$scale_set"'
REGION: Final = 'job=~"$job", region=~"$region"'  # of histograms, which have no more
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
    """The dashboard as JSON."""
    panels = parts.grid(
        (3, [(4, panel) for panel in _figures()]),
        (8, [(14, _coming()), (10, _heard())]),
        (
            7,
            [
                (6, _by_type()),
                (6, _silent()),
                (6, _lag("seconds", "s")),
                (6, _lag("records", "short")),
            ],
        ),
        (8, [(12, _records()), (12, _instances())]),
    )
    return parts.dashboard_json(
        "notbefore-event-hub",
        "Azure Scheduled Events: the fleet by Event Hub",
        "What all VMs report to the hub: events and the VMs that they affect, who is silent, how"
        " late it is read.",
        panels,
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
    return f"sum{f' by ({by}) ' if by else ''}({metric}{{{selector}}})"


def _grown(metric: str, selector: str, by: str, window: str) -> str:
    """What was counted.

    Each instance begins anew at its start: of a series without a sample before, all is new.
    """
    series = f"{metric}{{{selector}}}"
    new = f"last_over_time({series}[{window}]) unless {series} offset {window}"
    return f"sum by ({by}) ({new} or increase({series}[{window}]))"


def _figures() -> list[Panel]:
    started = f'event_status="started", {PLACE}'
    return [
        parts.stat_panel(
            "Events",
            "Events that are scheduled or have started, each once, however many VMs report it.",
            "short",
            now(f"{_sum('notbefore_fleet_events_pending')} or vector(0)"),
            NONE_IS_CALM,
        ),
        parts.stat_panel(
            "VMs affected",
            "VMs that these events affect; one that two events affect counts twice.",
            "short",
            now(f"{_sum('notbefore_fleet_vms_affected')} or vector(0)"),
            NONE_IS_CALM,
        ),
        parts.stat_panel(
            "Started",
            "Events that are going on.",
            "short",
            now(f"{_sum('notbefore_fleet_events_pending', started)} or vector(0)"),
            NONE_IS_GOOD,
        ),
        parts.stat_panel(
            "VMs heard from",
            "VMs that send heartbeats, the silent ones included.",
            "short",
            now(_sum("notbefore_fleet_vms_heard")),
            GOOD,
        ),
        parts.stat_panel(
            "Silent VMs",
            "VMs without a heartbeat for three of their intervals, and no event explains it.",
            "short",
            now(_sum("notbefore_fleet_vms_silent")),
            NONE_IS_GOOD,
        ),
        parts.stat_panel(
            "Lag",
            "Age of the oldest record that is still to be read, over all partitions.",
            "s",
            now(f"max(notbefore_fleet_lag_seconds{{{JOB}}})"),
            LATE,
            decimals=1,
        ),
    ]


def _coming() -> Panel:
    vms = f"sum by (event_type, region, scale_set, zone) (notbefore_fleet_vms_affected{{{PLACE}}})"
    labels = "event_type, region, scale_set, zone"
    events = _sum("notbefore_fleet_events_pending", by=BY_PLACE)
    asked = [
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
    return parts.table_panel(
        "Scheduled and started events",
        "Events that are not over, by type and place. VMs: those that all events of this type and"
        " place affect, whatever their status.",
        asked,
        columns,
        none="nothing scheduled",
    )


def _heard() -> Panel:
    by = "region, scale_set"
    asked = [
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
    return parts.table_panel(
        "VMs heard from",
        "By region and scale set: VMs that send heartbeats, and those of them that are silent now."
        " `/api/v1/fleet/events` has their names.",
        asked,
        columns,
        none="no heartbeats",
    )


def _by_type() -> Panel:
    return parts.lines_panel(
        "Events by type",
        "Events that are not over, by type.",
        "short",
        over_time(_sum("notbefore_fleet_events_pending", by="event_type"), "{{event_type}}"),
        stacked=True,
        points=200,
    )


def _silent() -> Panel:
    return parts.lines_panel(
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


def _lag(what: str, unit: str) -> Panel:
    said = {
        "seconds": "Age of the next record to be read",
        "records": "Records that are still to be read",
    }[what]
    return parts.lines_panel(
        f"Lag in {what}",
        f"{said}, by partition.",
        unit,
        over_time(
            f"max by (job, partition) (notbefore_fleet_lag_{what}{{{JOB}}})",
            "{{job}} {{partition}}",
        ),
    )


def _records() -> Panel:
    errors = _grown("notbefore_fleet_errors_total", JOB, "part", INTERVAL)
    return parts.lines_panel(
        "Records and errors",
        "Records that were read a second, by what they were: news changed an event, beat is a"
        " heartbeat, poison was not used. And errors of the hub and of the checkpoint store.",
        "short",
        over_time(
            f"sum by (result) (rate(notbefore_fleet_records_total{{{JOB}}}[{INTERVAL}]))",
            "{{result}}/s",
            "records",
        ),
        over_time(f"{errors} > 0", "errors: {{part}}", "errors"),
    )


def _instances() -> Panel:
    by = "job, instance"
    dead = f'sum by ({by}) (notbefore_outbox_deliveries{{state="dead", {JOB}}})'
    waiting = f"max by ({by}) (notbefore_outbox_oldest_pending_seconds{{{JOB}}})"
    partitions = f"max by ({by}) (notbefore_fleet_partitions{{{JOB}}})"
    asked = [
        rows(partitions, "partitions"),
        # an instance without any has no series
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
    return parts.table_panel(
        "Instances",
        "By instance: partitions that it reads; age of the oldest notification that waits for its"
        " receiver; refused notifications, which an operator must look at; resident size.",
        asked,
        columns,
        none="no instance is scraped",
    )
