"""``notbefore.json``: the agents themselves."""

from typing import Final

from grafana_foundation_sdk.models.dashboard import Panel

from boards import parts, queries
from boards.parts import GOOD, NONE_IS_GOOD, PLAIN, Column, now, over_time, rows
from boards.queries import LAST_POLL, STALE, VM, chosen, counted, rare_by, rate_by

GOOD_POLLS: Final = "changed|unchanged"


def build() -> str:
    """The dashboard as JSON."""
    panels = parts.grid(
        (3, [(4, panel) for panel in _figures()]),
        (8, [(14, _table()), (10, _delay())]),
        (7, [(8, _polls()), (8, _errors()), (8, _answers())]),
        (7, [(6, _deliveries()), (6, _outbox()), (6, _memory()), (6, _cpu())]),
    )
    return parts.dashboard_json(
        "notbefore-agents",
        "notbefore: the agents",
        "How the agents fare: polling, state, configuration, notifications, and what they cost.",
        panels,
        time="6h",
    )


def _figures() -> list[Panel]:
    late = chosen(f"time() - {LAST_POLL} > {STALE}")
    failed = queries.chosen_in_range(
        'increase(notbefore_config_reloads_total{result="failure"}[$__range])'
    )
    damaged = queries.chosen_in_range("increase(notbefore_store_damaged_files_total[$__range])")
    return [
        parts.stat_panel(
            "Agents",
            "Agents that are scraped now and know who they are.",
            "short",
            now(counted(VM)),
            GOOD,
            none="none",
        ),
        parts.stat_panel(
            "Versions",
            "How many versions of the agent run.",
            "short",
            now(counted(f"count by (version) ({chosen('notbefore_build_info')})")),
            PLAIN,
        ),
        parts.stat_panel(
            "Not polling",
            f"Agents without a good answer of IMDS for {STALE} s.",
            "short",
            now(counted(late)),
            NONE_IS_GOOD,
        ),
        parts.stat_panel(
            "State not written",
            "Agents that keep their state in memory alone: it is lost with a reboot.",
            "short",
            now(counted(f"({chosen('notbefore_store_degraded')}) == 1")),
            NONE_IS_GOOD,
        ),
        parts.stat_panel(
            "Damaged state files",
            "Files that were set aside in the time range; what was in them is not counted on.",
            "short",
            now(f"sum({damaged}) or vector(0)"),
            NONE_IS_GOOD,
        ),
        parts.stat_panel(
            "Failed reloads",
            "Configurations that were refused in the time range: the old one goes on.",
            "short",
            now(f"sum({failed}) or vector(0)"),
            NONE_IS_GOOD,
        ),
    ]


def _table() -> Panel:
    def named(expr: str) -> str:
        return f"max by (name, job, instance) ({expr} * on (job, instance) group_left (name) {VM})"

    version = f"notbefore_build_info * on (job, instance) group_left (name) {VM}"
    asked = [
        rows(f"max by (name, job, instance, version, api_version) ({version})", "build"),
        rows(named(f"(time() - {LAST_POLL})"), "poll"),
        rows(named("notbefore_poll_delay_seconds"), "delay"),
        rows(named("(time() - process_start_time_seconds)"), "up"),
        rows(named("process_resident_memory_bytes"), "memory"),
    ]
    columns = [
        Column("name", "VM"),
        Column("instance", "Instance"),
        Column("version", "Version", width=80),
        Column("api_version", "API", width=100),
        Column("Value #poll", "Last poll", "s", steps=parts.AGE, width=90, decimals=1),
        Column("Value #delay", "Delay", "s", width=80, decimals=2),
        Column("Value #up", "Running", "s", width=90, decimals=1),
        Column("Value #memory", "Resident", "bytes", width=90, decimals=0),
    ]
    return parts.table_panel(
        "Agents",
        "Each agent: its version and that of IMDS's interface, how long ago IMDS last answered, how"
        " late its polls are, how long it has been running, and what it holds in memory.",
        asked,
        columns,
        links={"VM": parts.vm_link("VM")},
    )


def _delay() -> Panel:
    delay = chosen("notbefore_poll_delay_seconds")
    return parts.lines_panel(
        "Delay of polls",
        "How late the polls are, over all agents. A Preempt gives 30 s of notice: a delay is taken"
        " from that.",
        "s",
        over_time(f"quantile(0.5, {delay})", "median", "p50"),
        over_time(f"quantile(0.95, {delay})", "95 %", "p95"),
        over_time(f"max({delay})", "worst", "max"),
    )


def _polls() -> Panel:
    return parts.lines_panel(
        "Polls",
        "Answers of IMDS a second, over all agents; changed: with another document than before.",
        "reqps",
        over_time(
            rate_by("result", f'notbefore_polls_total{{result=~"{GOOD_POLLS}"}}'), "{{result}}"
        ),
    )


def _errors() -> Panel:
    polls = rare_by("result", f'notbefore_polls_total{{result!~"{GOOD_POLLS}"}}')
    rejected = rare_by("reason", "notbefore_documents_rejected_total")
    flaws = rare_by("reason", "notbefore_event_flaws_total")
    return parts.lines_panel(
        "Errors of IMDS",
        "Polls that failed, documents that were none, and events or fields of them that could not"
        " be read, by reason.",
        "short",
        over_time(f"{polls} > 0", "poll: {{result}}", "polls"),
        over_time(f"{rejected} > 0", "document: {{reason}}", "documents"),
        over_time(f"{flaws} > 0", "event: {{reason}}", "flaws"),
        stacked=True,
        points=100,
    )


def _answers() -> Panel:
    buckets = rate_by("le", "notbefore_poll_duration_seconds_bucket")
    return parts.lines_panel(
        "Time to an answer",
        "How long IMDS takes to the end of its answer, errors included, over all agents.",
        "s",
        over_time(f"histogram_quantile(0.5, {buckets})", "median", "p50"),
        over_time(f"histogram_quantile(0.95, {buckets})", "95 %", "p95"),
        over_time(f"histogram_quantile(0.99, {buckets})", "99 %", "p99"),
    )


def _deliveries() -> Panel:
    results = 'notbefore_deliveries_total{result!="accepted"}'
    return parts.lines_panel(
        "Deliveries",
        "What became of notifications; failed: an attempt that is made again.",
        "short",
        over_time(rate_by("result", results, function="increase") + " > 0", "{{result}}"),
        stacked=True,
        points=100,
    )


def _outbox() -> Panel:
    starts = rare_by("reason", "notbefore_courier_starts_total")
    return parts.lines_panel(
        "Outbox and courier",
        "Notifications that are kept: pending; dead, which an operator must look at; repeating,"
        " sent again while the event lasts. And the couriers that were started, by why.",
        "short",
        over_time(f"sum by (state) ({chosen('notbefore_outbox_deliveries')})", "{{state}}", "rows"),
        over_time(f"{starts} > 0", "started: {{reason}}", "starts"),
    )


def _memory() -> Panel:
    memory = chosen("process_resident_memory_bytes")
    return parts.lines_panel(
        "Memory of the agents",
        "Resident size of the always-on process; the courier, which comes and goes, is not in it.",
        "bytes",
        over_time(f"quantile(0.5, {memory})", "median", "p50"),
        over_time(f"max({memory})", "worst", "max"),
    )


def _cpu() -> Panel:
    cpu = chosen("rate(process_cpu_seconds_total[$__rate_interval])")
    return parts.lines_panel(
        "CPU of the agents",
        "Share of one core that the always-on process takes.",
        "percentunit",
        over_time(f"quantile(0.5, {cpu})", "median", "p50"),
        over_time(f"max({cpu})", "worst", "max"),
    )
