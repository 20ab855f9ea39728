"""PromQL that stands in several panels.

Two things hold everywhere. What the variables choose are VMs, by the labels of
``notbefore_vm_info``; other metrics are filtered by it over ``job`` and ``instance``: another
exporter on the VM may have the same ``instance``. And every VM of a group reports the same event:
where events are counted they are first reduced to one series an ``event_id``.
"""

from typing import Final

from notbefore.core.event_types import EVENT_TYPES

VM: Final = (
    'notbefore_vm_info{location=~"$region", resource_group=~"$group", scale_set=~"$scale_set",'
    ' name=~"$vm"}'
)
VM_IN_RANGE: Final = f"last_over_time({VM}[$__range])"  # also those that have gone since
UP: Final = 'up{job="notbefore"}'  # the job that the rules know as well
# for this long a VM that is down keeps an event that others list still, as in the rules
EVENT: Final = "6h"
RANGE: Final = "$__range"
INTERVAL: Final = "$__rate_interval"
# a window -> the same in seconds
WINDOWS: Final = {
    RANGE: "$__range_s",
    INTERVAL: "$__rate_interval_ms / 1000",
}
# for this long it is known who an agent was that is silent, whatever the time range
LONG: Final = "7d"

INFO: Final = "azure_scheduled_event_status"
LAST_POLL: Final = "notbefore_last_successful_poll_timestamp_seconds"

PROMISED: Final = {
    name: round(event_type.promised_notice)
    for name, event_type in EVENT_TYPES.items()
    if event_type.promised_notice
}
"""Seconds of notice that Azure promises, by type; a type without a promise is not here."""

# seconds by which a notice may seem short: NotBefore is cut to seconds, and polls are a second
# apart
GRACE: Final = 5
STALE: Final = 60  # seconds without a good poll after which an agent counts as failing


def chosen(expr: str) -> str:
    """Those series of an expression that come from a chosen VM."""
    return f"({expr}) and on (job, instance) {VM}"


def chosen_in_range(expr: str) -> str:
    """As ``chosen``, for an expression over ``$__range``: with VMs that have gone since."""
    return f"({expr}) and on (job, instance) {VM_IN_RANGE}"


def counted(expr: str) -> str:
    """How many series; 0 for none."""
    return f"count({expr}) or vector(0)"


def events(selector: str = "", *, by: str = "event_id") -> str:
    """One series for each event that is listed now, whoever reports it."""
    return f"group by ({by}) ({chosen(INFO + selector)})"


def hits() -> str:
    """A series for each listed event and VM that it affects.

    For a VM that is down, its last known one.
    """
    listed = f'{INFO}{{scope="self"}}'
    lost = (
        f"last_over_time({listed}[{EVENT}]) unless on (job, instance) ({UP} == 1) and on (event_id)"
        f" {INFO}"
    )
    return f"({listed} or on (job, instance, event_id) ({lost}))"


def chosen_hits() -> str:
    """Those of ``hits`` that are of a chosen VM."""
    return f"({hits()}) and on (job, instance) last_over_time({VM}[{EVENT}])"


def started() -> str:
    """The events that anybody sees started."""
    return f'{INFO}{{event_status="Started"}}'


def known() -> str:
    """One series for each event that a selected VM lists, or that affects a selected VM which is
    down.
    """
    return f"group by (event_id) ({chosen(INFO)} or {chosen_hits()})"


def known_started() -> str:
    """Those of ``known`` that anybody sees started."""
    return f"{known()} and on (event_id) {started()}"


def listed(*, peers: bool = False) -> str:
    """One series for each listed event and VM that it hits, with what a table shows of both.

    ``peers``: also the listed events that do not affect the VM. The status is from any VM, because
    this one may be down.
    """
    labels = "name, event_id, event_type, event_source, scope, description"
    rows = f'({hits()} or {INFO}{{scope!="self"}})' if peers else hits()
    named = f"max by ({labels}) ({rows} * on (job, instance) group_left (name) {last_name(EVENT)})"
    status = (
        f"topk by (event_id) (1, group by (event_id, event_status) ({started()} or on (event_id)"
        f" {INFO}))"
    )
    return f"{named} * on (event_id) group_left (event_status) {status}"


def coming(*, peers: bool = False) -> str:
    """Those of ``listed`` that nobody sees started."""
    return f"({listed(peers=peers)} unless on (event_id) {started()})"


def of_event(metric: str) -> str:
    """A metric of the event, once for all VMs."""
    return f"max by (event_id) ({metric})"


def each_event(metric: str) -> str:
    """The last value of a metric for each event of the time range, with its type."""
    types = (
        f"group by (event_id, event_type) ({chosen_in_range(f'last_over_time({INFO}[$__range])')})"
    )
    return (
        f"max by (event_id) (last_over_time({metric}[$__range])) * on (event_id) group_right ()"
        f" {types}"
    )


def rate_by(labels: str, metric: str, *, function: str = "rate") -> str:
    """A sum of rates, for a panel over time."""
    return f"sum by ({labels}) ({chosen(f'{function}({metric}[$__rate_interval])')})"


def increase_by(labels: str, metric: str) -> str:
    """What was counted in the time range."""
    return f"sum by ({labels}) ({chosen_in_range(f'increase({metric}[$__range])')})"


def grown(metric: str, created: str, window: str) -> str:
    """What a counter of events grew by; ``window``: RANGE or INTERVAL.

    Its series begins with the first event of its kind, at 1, and increase() does not see that. A
    series that was created in the window, and had no sample before it, grew by its last value.
    ``created`` is at most five minutes older than the first sample: an interval of scrapes, and
    what the clocks differ.
    """
    born = f"last_over_time({created}[{window}]) > time() - 300 - {WINDOWS[window]}"
    new = (
        f"last_over_time({metric}[{window}]) unless {metric} offset {window} and ignoring (le)"
        f" ({born})"
    )
    return f"({new} or increase({metric}[{window}]))"


def rare_by(labels: str, metric: str) -> str:
    """What was counted of a kind that mostly never occurs, for a panel over time.

    These counters begin anew with each start of the agent: of one without a sample before the
    window, all is new.
    """
    new = f"last_over_time({metric}[{INTERVAL}]) unless {metric} offset {INTERVAL}"
    return f"sum by ({labels}) ({chosen(f'({new} or increase({metric}[{INTERVAL}]))')})"


def grown_by(labels: str, metric: str, created: str) -> str:
    """What events were counted in the time range."""
    return f"sum by ({labels}) ({chosen_in_range(grown(metric, created, RANGE))})"


def growth_by(labels: str, metric: str, created: str) -> str:
    """What events were counted, for a panel over time."""
    return f"sum by ({labels}) ({chosen(grown(metric, created, INTERVAL))})"


def quantile_by(labels: str, quantile: float, metric: str, created: str = "") -> str:
    """A quantile over the time range; nothing, rather than NaN, where nothing was observed."""
    by, bucket = f"le, {labels}", f"{metric}_bucket"
    buckets = grown_by(by, bucket, created) if created else increase_by(by, bucket)
    return f"histogram_quantile({quantile:g}, {buckets}) >= 0"


def promised() -> str:
    """The notice that Azure promises, as a series a type."""
    constants = (
        f'label_replace(vector({s}), "event_type", "{t}", "", "")' for t, s in PROMISED.items()
    )
    return " or ".join(constants)


def last_name(window: str) -> str:
    """One series for each chosen VM, now or when last known.

    An address may have had several VMs in that time.
    """
    return f"topk by (job, instance) (1, {VM} or on (job, instance) last_over_time({VM}[{window}]))"


def failing() -> str:
    """A series for each agent that is silent or failing: what is wrong, and for how long nothing
    good was heard.

    That is NaN for a target that was never scraped. One that never said who it is is there whatever
    the variables say.
    """
    loaded = "notbefore_config_loaded_timestamp_seconds"
    started = f"max by (job, instance) ({loaded})"
    heard = (
        f"last_over_time({LAST_POLL}[{LONG}]) or on (job, instance)"
        f" last_over_time({loaded}[{LONG}])"
    )
    last = f"max by (job, instance) ({heard})"
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
    named = (
        f'label_replace({expr}, "problem", "{problem}", "", "")'
        for problem, expr in problems.items()
    )
    nameless = (
        f"group by (job, instance) ({UP} or {loaded})"
        f" unless on (job, instance) last_over_time(notbefore_vm_info[{LONG}])"
    )
    return (
        f"({' or '.join(named)}) * on (job, instance) group_left (name) ({last_name(LONG)} or"
        f" ({nameless}))"
    )


def failing_agents() -> str:
    """How many; an agent may fail in several ways."""
    return counted(f"group by (job, instance) ({failing()})")


def notice_buckets() -> str:
    """The notices of events by bucket. A scale set counts once: its VMs tell of the same events."""
    alone = f'label_replace({VM}, "group", "$1", "name", "(.*)")'
    group = f'label_replace({alone}, "group", "$1", "scale_set", "(.+)")'
    notice = "azure_scheduled_event_initial_notice_seconds"
    given = grown(f"{notice}_bucket", f"{notice}_created", INTERVAL)
    joined = f"{given} * on (job, instance) group_left (resource_group, group) {group}"
    return f"sum by (le) (max by (le, event_type, resource_group, group) ({joined}))"
