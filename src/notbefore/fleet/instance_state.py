"""``InstanceState``: the state of an instance as other threads see it.

The consumer's thread makes it of frozen values, so that no thread reads what another one changes.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain
from typing import Final, get_args

from msgspec import Struct

from notbefore.core.text import counted, natural
from notbefore.fleet.azure_messages import AzureStatus
from notbefore.fleet.hub_records import Place
from notbefore.fleet.keeper import Keeper
from notbefore.fleet.mutes import Mute
from notbefore.fleet.partition import Partition
from notbefore.fleet.shown_waves import ShownPartition, ShownVm, ShownWave, coming
from notbefore.fleet.silence import Heard
from notbefore.fleet.snapshot import Snapshot
from notbefore.fleet.story import OVER, EndedBy
from notbefore.metrics import fleet as metrics
from notbefore.metrics.families import Metric
from notbefore.metrics.totals import Histogram, Labels

AZURE_LABELS: Final = (*get_args(AzureStatus), "skipped")  # of Azure's messages in metrics

Lag = Mapping[str, tuple[int, float]]
"""Partition -> how many records and seconds it is behind the hub."""


class Reading(Struct, frozen=True):
    """How well the hub is read."""

    connected: bool = False
    lag: Lag = {}
    mutes: tuple[Mute, ...] = ()


class InstanceState(Struct, frozen=True, kw_only=True):
    """The state of an instance, and of the whole fleet as its snapshots show it."""

    reading: Reading
    # ---- of this instance
    hub_trouble: str  # the last error of the hub or the store
    snapshot_trouble: str  # why a snapshot cannot be written
    refused: tuple[str, ...]  # why partitions are left to a newer version
    gap: str  # why events of its partitions may be unknown
    split: str  # which events are open in several partitions
    counts: metrics.Counts
    azure_delays: Histogram
    own_partitions: int
    own_events: int  # that are open
    open_keys: frozenset[str]  # the event keys of their notifications
    # ---- of the whole fleet
    fleet_gap: str  # why events of any partition may be unknown
    partitions: tuple[ShownPartition, ...]
    waves: tuple[ShownWave, ...]
    heard: tuple[ShownVm, ...]
    missing: tuple[ShownVm, ...]
    without_agent: tuple[ShownVm, ...]  # VMs that only Azure has named


def state_of(
    keeper: Keeper, reading: Reading, now: float, metrics_by: Collection[str]
) -> InstanceState:
    """Return the state of an instance.

    ``now``: Unix seconds of the hub's clock. ``metrics_by``: the places that metrics have as
    labels, see ``FleetConfig``.
    """
    folds = keeper.folds
    states = [fold.state for fold in folds]
    others = keeper.others.found
    all_states = [*states, *others.values()]

    wall = datetime.now(UTC)
    partitions = [ShownPartition(fold.name, None) for fold in folds]
    for name, state in others.items():
        partitions.append(ShownPartition(name, max(0.0, wall.timestamp() - state.at)))
    partitions.sort(key=_partition_order)

    waves = chain.from_iterable(state.waves.values() for state in all_states)
    without_agent = _vms_without_agent(all_states)
    return InstanceState(
        reading=reading,
        hub_trouble=keeper.hub_trouble,
        snapshot_trouble=keeper.trouble,
        refused=tuple(keeper.refused.values()),
        gap=_gap(states, now),
        split=_split(keeper.split),
        counts=_counts(keeper, reading, now, metrics_by),
        azure_delays=keeper.figures.azure_delays,
        own_partitions=len(folds),
        own_events=sum(len(fold.events.open) for fold in folds),
        open_keys=frozenset(chain.from_iterable(fold.event_keys() for fold in folds)),
        fleet_gap=_fleet_gap(keeper, partitions, all_states, now),
        partitions=tuple(partitions),
        waves=coming(waves, wall, without_agent.keys()),
        heard=tuple(_shown_vms(all_states)),
        missing=tuple(_missing_vms(all_states)),
        without_agent=tuple(without_agent.values()),
    )


def _partition_order(partition: ShownPartition) -> tuple[list[str | int], str]:
    return natural(partition.name)


def _shown_vms(states: Iterable[Snapshot]) -> Iterable[ShownVm]:
    for state in states:
        for vm in state.heard.values():
            yield _shown_vm(vm)


def _missing_vms(states: Iterable[Snapshot]) -> Iterable[ShownVm]:
    for state in states:
        for vm in state.expected.values():
            if vm.silent:
                yield _shown_vm(vm)


def _vms_without_agent(states: Sequence[Snapshot]) -> dict[str, ShownVm]:
    """Return the VMs, by their keys, that Azure has named and no partition has heard from."""
    vms: dict[str, ShownVm] = {}
    for state in states:
        for key, vm in state.azure_vms.items():
            if not any(key in other.heard for other in states):
                vms[key] = ShownVm(vm.name, vm.place)
    return vms


def _shown_vm(vm: Heard) -> ShownVm:
    return ShownVm(vm.name, vm.place, vm.silent)


# ---- gaps and splits, in words


def _fleet_gap(
    keeper: Keeper,
    shown: Iterable[ShownPartition],
    states: Iterable[Snapshot],
    now: float,
) -> str:
    """Return why events of the fleet may be unknown; empty if they are not."""
    names = {partition.name for partition in shown}
    unread = len(keeper.ends.keys() - names)
    if unread:
        partitions = counted(len(keeper.ends), "partition")
        return f"{unread} of the hub's {partitions} could not be read yet"
    return _gap(states, now)


def _gap(states: Iterable[Snapshot], now: float) -> str:
    """Return why events of these partitions may be unknown; empty if they are not."""
    lost = 0
    unknown = 0
    for state in states:
        lost += state.was_lost(now)
        unknown += state.unknown_events(now)

    if unknown == 1:
        return "1 event that VMs list was never reported here"
    if unknown:
        return f"{unknown} events that VMs list were never reported here"
    if lost == 1:
        return "1 snapshot was lost: events older than the hub's retention may be missing"
    if lost:
        return f"{lost} snapshots were lost: events older than the hub's retention may be missing"
    return ""


def _split(split: Mapping[str, Sequence[str]]) -> str:
    """Return which events are open in several partitions; empty if there are none."""
    if not split:
        return ""
    key, partitions = next(iter(split.items()))
    event_id = key.rpartition("/")[-1]
    where = " and ".join(partitions)
    if len(split) == 1:
        subject = f"1 event is open in several partitions ({event_id} in {where})"
    else:
        subject = f"{len(split)} events are open in several partitions ({event_id} in {where})"
    return f"{subject}: Azure's messages and the records of the VMs must be in the same partition"


# ---- the metrics of this instance


def _counts(
    keeper: Keeper, reading: Reading, now: float, metrics_by: Collection[str]
) -> metrics.Counts:
    figures = keeper.figures
    states = [fold.state for fold in keeper.folds]
    lost = sum(state.was_lost(now) for state in states)
    unknown = sum(state.unknown_events(now) for state in states)
    lag = reading.lag.items()
    return {
        **_events_by_place(keeper.folds, metrics_by),
        **_vms_by_place(keeper.folds, metrics_by),
        metrics.RECORDS: _by_label(figures.records),
        metrics.POISON: _by_label(figures.poison),
        metrics.ERRORS: _by_label(figures.errors),
        metrics.MISSING: {(): figures.missing},
        metrics.AZURE_MESSAGES: _by_label(figures.azure_messages, *AZURE_LABELS),
        metrics.FIRST_NOTICES: _by_label(figures.first_notices, "azure", "vm"),
        metrics.ENDS: _by_label(figures.ends, *get_args(EndedBy)),
        metrics.CONTRADICTIONS: {(): figures.contradictions},
        metrics.LOST_SNAPSHOTS: {(): lost},
        metrics.NEWER_SNAPSHOTS: {(): len(keeper.refused)},
        metrics.UNKNOWN_EVENTS: {(): unknown},
        metrics.SPLIT_EVENTS: {(): len(keeper.split)},
        metrics.AZURE_VMS: {(): len(_vms_without_agent(states))},
        metrics.PARTITIONS: {(): len(states)},
        metrics.CONNECTED: {(): int(reading.connected)},
        metrics.LAG_RECORDS: {(name,): records for name, (records, _) in lag},
        metrics.LAG_SECONDS: {(name,): seconds for name, (_, seconds) in lag},
    }


def _by_label(counter: Counter[str], *always: str) -> dict[Labels, float]:
    """Return the counts by label.

    Those in ``always`` are included even if they are 0, so that alerts see their first increase.
    """
    return {(label,): counter[label] for label in dict.fromkeys((*always, *counter))}


def _events_by_place(
    folds: Iterable[Partition], metrics_by: Collection[str]
) -> dict[Metric, Counter[Labels]]:
    """Return the numbers of events that are not over, and of the VMs that they affect."""
    events: Counter[Labels] = Counter()
    vms: Counter[Labels] = Counter()
    for fold in folds:
        for story in fold.events.open.values():
            if story.standing in OVER or story.key in fold.events.continued:
                continue
            place = story.place
            labels = (
                story.event.event_type,
                place.region,
                place.scale_set,
                place.zone,
                *_owner(place, metrics_by),
            )
            events[(*labels, story.standing.name.lower())] += 1
            vms[labels] += len(story.event.resources)
    return {metrics.EVENTS: events, metrics.VMS: vms}


def _vms_by_place(
    folds: Iterable[Partition], metrics_by: Collection[str]
) -> dict[Metric, Counter[Labels]]:
    """Return the numbers of VMs that are heard from, silent, and missing."""
    heard: Counter[Labels] = Counter()
    silent: Counter[Labels] = Counter()
    missing: Counter[Labels] = Counter()
    for fold in folds:
        for vm in fold.state.heard.values():
            labels = _labels_of_vm(vm.place, metrics_by)
            heard[labels] += 1
            silent[labels] += vm.silent
        for vm in fold.state.expected.values():
            if vm.silent:
                missing[_labels_of_vm(vm.place, metrics_by)] += 1
    return {metrics.HEARD: heard, metrics.SILENT: silent, metrics.MISSING_VMS: missing}


def _labels_of_vm(place: Place, metrics_by: Collection[str]) -> Labels:
    return (place.region, place.scale_set, *_owner(place, metrics_by))


def _owner(place: Place, metrics_by: Collection[str]) -> tuple[str, str]:
    """Return the labels subscription and resource_group: empty unless ``metrics_by`` has them."""
    subscription = ""
    resource_group = ""
    if "subscription" in metrics_by:
        subscription = place.subscription
    if "resource_group" in metrics_by:
        resource_group = place.resource_group
    return subscription, resource_group
