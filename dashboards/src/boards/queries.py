"""PromQL of several panels.

Two rules hold everywhere. The variables choose VMs by the labels of ``notbefore_vm_info``. Other
metrics are joined with it on ``job`` and ``instance``: another exporter on the VM may have the same
``instance``. And every VM of a group reports the same event, so before events are counted, they are
reduced to one series for each ``event_id``.
"""

from typing import Final

from notbefore.core.event_types import EVENT_TYPES

VM: Final = (
    'notbefore_vm_info{location=~"$region", resource_group=~"$group", scale_set=~"$scale_set",'
    ' name=~"$vm"}'
)
VM_IN_RANGE: Final = f"last_over_time({VM}[$__range])"  # also VMs that are gone now
UP: Final = 'up{job="notbefore"}'  # the alert rules use the same job
# a VM that is down keeps an event that others still list, for this long, as in the alert rules
EVENT: Final = "6h"
RANGE: Final = "$__range"
INTERVAL: Final = "$__rate_interval"
# window -> its length in seconds
WINDOWS: Final = {
    RANGE: "$__range_s",
    INTERVAL: "$__rate_interval_ms / 1000",
}
# a silent agent keeps the name of its VM for this long, whatever the time range
LONG: Final = "7d"

INFO: Final = "azure_scheduled_event_status"
LAST_POLL: Final = "notbefore_last_successful_poll_timestamp_seconds"

PROMISED: Final = {
    name: round(event_type.promised_notice)
    for name, event_type in EVENT_TYPES.items()
    if event_type.promised_notice
}
"""Seconds of notice that Azure promises, by type; a type without a promise is not here."""

# seconds by which a notice may seem too short: NotBefore has whole seconds, and polls are a second
# apart
GRACE: Final = 5
STALE: Final = 60  # seconds without a good poll after which an agent counts as failing


def chosen(expr: str) -> str:
    """Return the series of an expression that come from a chosen VM."""
    return f"({expr}) and on (job, instance) {VM}"


def chosen_in_range(expr: str) -> str:
    """Do the same as ``chosen`` over ``$__range``, also for VMs that are gone now."""
    return f"({expr}) and on (job, instance) {VM_IN_RANGE}"


def counted(expr: str) -> str:
    """Return the number of series; 0 for none."""
    return f"count({expr}) or vector(0)"


def events(selector: str = "", *, by: str = "event_id") -> str:
    """Return one series for each event that is listed now, however many VMs report it."""
    return f"group by ({by}) ({chosen(INFO + selector)})"


def hits() -> str:
    """Return a series for each listed event and VM that it affects.

    A VM that is down keeps its last ones.
    """
    listed = f'{INFO}{{scope="self"}}'
    lost = (
        f"last_over_time({listed}[{EVENT}]) unless on (job, instance) ({UP} == 1) and on (event_id)"
        f" {INFO}"
    )
    return f"({listed} or on (job, instance, event_id) ({lost}))"


def chosen_hits() -> str:
    """Return the series of ``hits`` that belong to a chosen VM."""
    return f"({hits()}) and on (job, instance) last_over_time({VM}[{EVENT}])"


def started() -> str:
    """Return the events that any VM reports as started."""
    return f'{INFO}{{event_status="Started"}}'


def current_events() -> str:
    """Return one series for each event that a chosen VM lists, or that affects a chosen VM that is
    down.
    """
    return f"group by (event_id) ({chosen(INFO)} or {chosen_hits()})"


def current_started_events() -> str:
    """Return the current events that any VM reports as started."""
    return f"{current_events()} and on (event_id) {started()}"


def listed(*, peers: bool = False) -> str:
    """Return one series for each listed event and VM that it affects, with labels of both.

    ``peers``: also for listed events that do not affect the VM. The status comes from any VM,
    because this one may be down.
    """
    labels = "name, event_id, event_type, event_source, scope, description"
    rows = f'({hits()} or {INFO}{{scope!="self"}})' if peers else hits()
    named = f"max by ({labels}) ({rows} * on (job, instance) group_left (name) {last_name(EVENT)})"
    status = (
        f"topk by (event_id) (1, group by (event_id, event_status) ({started()} or on (event_id)"
        f" {INFO}))"
    )
    return f"{named} * on (event_id) group_left (event_status) {status}"


def not_started(*, peers: bool = False) -> str:
    """Return the series of ``listed`` whose events no VM reports as started."""
    return f"({listed(peers=peers)} unless on (event_id) {started()})"


def of_event(metric: str) -> str:
    """Return one series of a metric for each event."""
    return f"max by (event_id) ({metric})"


def each_event(metric: str) -> str:
    """Return the last value of a metric for each event of the time range, with its type."""
    events_in_range = chosen_in_range(f"last_over_time({INFO}[$__range])")
    types = f"group by (event_id, event_type) ({events_in_range})"
    return (
        f"max by (event_id) (last_over_time({metric}[$__range])) * on (event_id) group_right ()"
        f" {types}"
    )


def rate_by(labels: str, metric: str, *, function: str = "rate") -> str:
    """Return a sum of rates, for a panel over time."""
    rate = f"{function}({metric}[$__rate_interval])"
    return f"sum by ({labels}) ({chosen(rate)})"


def increase_by(labels: str, metric: str) -> str:
    """Return by how much a counter grew in the time range."""
    increase = f"increase({metric}[$__range])"
    return f"sum by ({labels}) ({chosen_in_range(increase)})"


def grown(metric: str, created: str, window: str) -> str:
    """Return by how much a counter of events grew; ``window``: RANGE or INTERVAL.

    Its series begins with the first event of its kind, at 1, which increase() ignores. So a series
    that was created in the window, and has no sample before it, grew by its last value. ``created``
    is at most five minutes older than the first sample: an interval of scrapes, and the difference
    of two clocks.
    """
    born = f"last_over_time({created}[{window}]) > time() - 300 - {WINDOWS[window]}"
    new = (
        f"last_over_time({metric}[{window}]) unless {metric} offset {window} and ignoring (le)"
        f" ({born})"
    )
    return f"({new} or increase({metric}[{window}]))"


def rare_by(labels: str, metric: str) -> str:
    """Return by how much a counter grew that mostly stays at 0, for a panel over time.

    These counters begin at 0 with each start of the agent. So a series without a sample before the
    window grew by its whole value.
    """
    new = f"last_over_time({metric}[{INTERVAL}]) unless {metric} offset {INTERVAL}"
    growth = f"({new} or increase({metric}[{INTERVAL}]))"
    return f"sum by ({labels}) ({chosen(growth)})"


def grown_by(labels: str, metric: str, created: str) -> str:
    """Return by how much a counter of events grew in the time range."""
    return f"sum by ({labels}) ({chosen_in_range(grown(metric, created, RANGE))})"


def growth_by(labels: str, metric: str, created: str) -> str:
    """Return by how much a counter of events grew, for a panel over time."""
    return f"sum by ({labels}) ({chosen(grown(metric, created, INTERVAL))})"


def quantile_by(labels: str, quantile: float, metric: str, created: str = "") -> str:
    """Return a quantile over the time range, without the NaN of a histogram without values."""
    by = f"le, {labels}"
    buckets = increase_by(by, f"{metric}_bucket")
    if created:
        buckets = grown_by(by, f"{metric}_bucket", created)
    return f"histogram_quantile({quantile:g}, {buckets}) >= 0"


def promised() -> str:
    """Return one series for each type: the notice that Azure promises."""
    constants: list[str] = []
    for event_type, seconds in PROMISED.items():
        constants.append(f'label_replace(vector({seconds}), "event_type", "{event_type}", "", "")')
    return " or ".join(constants)


def last_name(window: str) -> str:
    """Return one series for each chosen VM, the last in a window.

    In this time several VMs may have had the same address.
    """
    return f"topk by (job, instance) (1, {VM} or on (job, instance) last_over_time({VM}[{window}]))"


def failing() -> str:
    """Return a series for each silent or failing agent: its problem, and the time since the last
    good poll.

    The time is NaN for a target that was never scraped. An agent whose VM is not known is included,
    whatever the variables choose.
    """
    loaded = "notbefore_config_loaded_timestamp_seconds"
    started = f"max by (job, instance) ({loaded})"
    signs_of_life = (
        f"last_over_time({LAST_POLL}[{LONG}]) or on (job, instance)"
        f" last_over_time({loaded}[{LONG}])"
    )
    last = f"max by (job, instance) ({signs_of_life})"
    recent = f"max by (job, instance) (last_over_time({LAST_POLL}[1h]))"
    down = f"({UP} == 0)"
    problems = {
        "cannot be scraped": f"(time() - {last}) and on (job, instance) {down}",
        "never scraped": f"max by (job, instance) ({down} / 0) unless on (job, instance) {last}",
        "gone from the scrape": (
            f"(time() - {recent}) unless on (job, instance) ({UP} or {LAST_POLL})"
        ),
        "IMDS does not answer": f"(time() - max by (job, instance) ({LAST_POLL})) > {STALE}",
        "state cannot be written": (
            f"(time() - {last}) and on (job, instance) (notbefore_store_degraded == 1)"
        ),
        "never polled": f"(time() - {started}) unless on (job, instance) {LAST_POLL}",
    }
    labeled = [
        f'label_replace({expr}, "problem", "{problem}", "", "")'
        for problem, expr in problems.items()
    ]
    nameless = (
        f"group by (job, instance) ({UP} or {loaded})"
        f" unless on (job, instance) last_over_time(notbefore_vm_info[{LONG}])"
    )
    return (
        f"({' or '.join(labeled)}) * on (job, instance) group_left (name) ({last_name(LONG)} or"
        f" ({nameless}))"
    )


def failing_agents() -> str:
    """Return the number of silent or failing agents. An agent may have several problems."""
    return counted(f"group by (job, instance) ({failing()})")


def notice_buckets() -> str:
    """Return the notices of events by bucket. A scale set counts once: its VMs report the same
    events.
    """
    alone = f'label_replace({VM}, "group", "$1", "name", "(.*)")'
    group = f'label_replace({alone}, "group", "$1", "scale_set", "(.+)")'
    notice = "azure_scheduled_event_initial_notice_seconds"
    new_notices = grown(f"{notice}_bucket", f"{notice}_created", INTERVAL)
    joined = f"{new_notices} * on (job, instance) group_left (resource_group, group) {group}"
    return f"sum by (le) (max by (le, event_type, resource_group, group) ({joined}))"
