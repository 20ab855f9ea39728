"""``notbefore.json``: the health of the agents."""

from typing import Final

from grafana_foundation_sdk.models.dashboard import Panel

from boards import frame, panels, queries
from boards.panels import GOOD, NONE_IS_GOOD, PLAIN, Column, now, over_time, rows
from boards.queries import LAST_POLL, STALE, VM, chosen, counted, rare_by, rate_by

GOOD_POLLS: Final = "changed|unchanged"


def build() -> str:
    """Return the dashboard as JSON."""
    figures = [(4, panel) for panel in _figures()]
    grid = frame.grid(
        (3, figures),
        (8, [(14, _table()), (10, _delay())]),
        (7, [(8, _polls()), (8, _errors()), (8, _answers())]),
        (7, [(6, _deliveries()), (6, _outbox()), (6, _memory()), (6, _cpu())]),
    )
    return frame.dashboard_json(
        "notbefore-agents",
        "notbefore: the agents",
        "Health of the agents: polling, state, configuration, notifications, memory and CPU.",
        grid,
        time="6h",
    )


def _figures() -> list[Panel]:
    late = chosen(f"time() - {LAST_POLL} > {STALE}")
    failed = queries.chosen_in_range(
        'increase(notbefore_config_reloads_total{result="failure"}[$__range])'
    )
    damaged = queries.chosen_in_range("increase(notbefore_store_damaged_files_total[$__range])")
    return [
        panels.stat_panel(
            "Agents",
            "Agents that are scraped now and know who they are.",
            "short",
            now(counted(VM)),
            GOOD,
            none="none",
        ),
        panels.stat_panel(
            "Versions",
            "How many versions of the agent run.",
            "short",
            now(counted(f"count by (version) ({chosen('notbefore_build_info')})")),
            PLAIN,
        ),
        panels.stat_panel(
            "Not polling",
            f"Agents without a good answer of IMDS for {STALE} s.",
            "short",
            now(counted(late)),
            NONE_IS_GOOD,
        ),
        panels.stat_panel(
            "State not written",
            "Agents that keep their state only in memory: a reboot loses it.",
            "short",
            now(counted(f"({chosen('notbefore_store_degraded')}) == 1")),
            NONE_IS_GOOD,
        ),
        panels.stat_panel(
            "Damaged state files",
            "State files that were found damaged and set aside in the time range.",
            "short",
            now(f"sum({damaged}) or vector(0)"),
            NONE_IS_GOOD,
        ),
        panels.stat_panel(
            "Failed reloads",
            "Configurations that were refused in the time range; the old one stays in use.",
            "short",
            now(f"sum({failed}) or vector(0)"),
            NONE_IS_GOOD,
        ),
    ]


def _table() -> Panel:
    def named(expr: str) -> str:
        return f"max by (name, job, instance) ({expr} * on (job, instance) group_left (name) {VM})"

    version = f"notbefore_build_info * on (job, instance) group_left (name) {VM}"
    table_queries = [
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
        Column("Value #poll", "Last poll", "s", steps=panels.AGE, width=90, decimals=1),
        Column("Value #delay", "Delay", "s", width=80, decimals=2),
        Column("Value #up", "Running", "s", width=90, decimals=1),
        Column("Value #memory", "Resident", "bytes", width=90, decimals=0),
    ]
    return panels.table_panel(
        "Agents",
        "Each agent: its version, the api-version, the time since IMDS last answered, the delay of"
        " its polls, the time since its start, and its resident memory.",
        table_queries,
        columns,
        links={"VM": frame.vm_link("VM")},
    )


def _delay() -> Panel:
    delay = chosen("notbefore_poll_delay_seconds")
    return panels.lines_panel(
        "Delay of polls",
        "How late the polls are, over all agents. A Preempt gives 30 s of notice, and a delay"
        " shortens it.",
        "s",
        over_time(f"quantile(0.5, {delay})", "median", "p50"),
        over_time(f"quantile(0.95, {delay})", "95 %", "p95"),
        over_time(f"max({delay})", "worst", "max"),
    )


def _polls() -> Panel:
    return panels.lines_panel(
        "Polls",
        "Answers of IMDS per second, over all agents. changed: the document differs from the last.",
        "reqps",
        over_time(
            rate_by("result", f'notbefore_polls_total{{result=~"{GOOD_POLLS}"}}'), "{{result}}"
        ),
    )


def _errors() -> Panel:
    polls = rare_by("result", f'notbefore_polls_total{{result!~"{GOOD_POLLS}"}}')
    rejected = rare_by("reason", "notbefore_documents_rejected_total")
    flaws = rare_by("reason", "notbefore_event_flaws_total")
    return panels.lines_panel(
        "Errors of IMDS",
        "Polls that failed, documents that were not valid, and events or fields that could not be"
        " read, by reason.",
        "short",
        over_time(f"{polls} > 0", "poll: {{result}}", "polls"),
        over_time(f"{rejected} > 0", "document: {{reason}}", "documents"),
        over_time(f"{flaws} > 0", "event: {{reason}}", "flaws"),
        stacked=True,
        points=100,
    )


def _answers() -> Panel:
    buckets = rate_by("le", "notbefore_poll_duration_seconds_bucket")
    return panels.lines_panel(
        "Time to an answer",
        "Time from a request to the end of IMDS's answer, also of an error, over all agents.",
        "s",
        over_time(f"histogram_quantile(0.5, {buckets})", "median", "p50"),
        over_time(f"histogram_quantile(0.95, {buckets})", "95 %", "p95"),
        over_time(f"histogram_quantile(0.99, {buckets})", "99 %", "p99"),
    )


def _deliveries() -> Panel:
    results = 'notbefore_deliveries_total{result!="accepted"}'
    return panels.lines_panel(
        "Deliveries",
        "Results of deliveries. failed: an attempt that is repeated.",
        "short",
        over_time(rate_by("result", results, function="increase") + " > 0", "{{result}}"),
        stacked=True,
        points=100,
    )


def _outbox() -> Panel:
    starts = rare_by("reason", "notbefore_courier_starts_total")
    return panels.lines_panel(
        "Outbox and courier",
        "Notifications in the outbox: pending; dead, which need an operator; repeating, which are"
        " sent again while the event lasts. And starts of couriers, by reason.",
        "short",
        over_time(f"sum by (state) ({chosen('notbefore_outbox_deliveries')})", "{{state}}", "rows"),
        over_time(f"{starts} > 0", "started: {{reason}}", "starts"),
    )


def _memory() -> Panel:
    memory = chosen("process_resident_memory_bytes")
    return panels.lines_panel(
        "Memory of the agents",
        "Resident memory of the always-on process, without the courier, which runs when needed.",
        "bytes",
        over_time(f"quantile(0.5, {memory})", "median", "p50"),
        over_time(f"max({memory})", "worst", "max"),
    )


def _cpu() -> Panel:
    cpu = chosen("rate(process_cpu_seconds_total[$__rate_interval])")
    return panels.lines_panel(
        "CPU of the agents",
        "Share of one core that the always-on process uses.",
        "percentunit",
        over_time(f"quantile(0.5, {cpu})", "median", "p50"),
        over_time(f"max({cpu})", "worst", "max"),
    )
