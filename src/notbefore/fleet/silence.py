"""``Silence``: the VMs that were heard from, and those that fell silent without an event that
explains it. Pure.

A VM is known from its first heartbeat on. It is silent after three of its intervals without a
record from it. The silent VMs of one scale set or resource group are one wave, of the type
``Silent``: it starts with the first of them, and is over once all are heard from again. If several
scale sets or resource groups of one region fall silent at once, they are one wave, which others may
join before it is over. The VMs of an inventory that are not heard from at all are missing, by the
same rules. Times are Unix seconds of the hub's clock.
"""

from collections import Counter, deque
from sys import intern
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from notbefore.core.change import SILENT
from notbefore.core.document import STARTED, Event
from notbefore.core.text import sha256
from notbefore.fleet.hub_records import (
    Beat,
    Place,
    PoisonError,
    Report,
    VmGroup,
    one_place,
)
from notbefore.fleet.story import Standing, Story, from_unix
from notbefore.fleet.wave import OpenWaves
from notbefore.fleet.waves import Grouping, Waves
from notbefore.wording.phrases import MISSING

INTERVALS: Final = 3  # of its heartbeats: after so many without a record a VM is silent
FORGET_SECONDS: Final = 86_400.0  # after which a silent VM is forgotten: it was probably deleted
SHORTEST_INTERVAL: Final = 10.0  # seconds between heartbeats: a shorter interval counts as this
LONGEST_INTERVAL: Final = 86_400.0  # a longer interval counts as this
MAX_HEARD: Final = 50_000  # VMs of one partition
# of them in one resource group: its VMs can report under any name
MAX_HEARD_OF_GROUP: Final = 20_000
# bytes of the names, places and tags of all VMs of one partition: its snapshot contains them
MAX_HEARD_BYTES: Final = 64 * 1024 * 1024
_TOGETHER: Final = ("subscription", "resource_group", "scale_set")


Expected = dict[str, tuple[str, Place]]
"""VMs of an inventory: ``SUBSCRIPTION/RESOURCE GROUP/NAME`` in one case -> name and place."""


class Heard(Struct, array_like=True):
    """A VM that has sent a heartbeat, or is expected to."""

    name: str
    at: float  # the last record from it, or since when it is expected
    interval: float  # seconds between its heartbeats
    place: Place  # with its tags
    silent: bool = False  # or missing


def _bytes_of(key: str, vm: Heard) -> int:
    """Return about how many bytes a VM needs in a snapshot."""
    texts = [key, vm.name, *vm.place[:-1]]
    for name, value in vm.place.tags:
        texts += (name, value)
    return sum(len(text.encode(errors="replace")) for text in texts)


class ChangedPlace(NamedTuple):
    """A place that a look has found, with its story, if it has one, and its silent VMs."""

    place: Place
    story: Story | None
    silent: list[Heard]
    with_others: bool  # other groups of its region have fallen silent at the same time


class Silence:
    """The VMs of one partition.

    ``waves``: the waves of silent VMs. ``heard``: the VMs by their keys, which are resource group
    and name (``Place.group``). Both are changed in place. ``missing``: the VMs are those of an
    inventory, which ``expect`` sets, not those that were heard from.
    """

    def __init__(
        self,
        grouping: Grouping,
        waves: OpenWaves,
        heard: dict[str, Heard],
        *,
        missing: bool = False,
    ) -> None:
        self.heard = heard
        self.waves = Waves(replace(grouping, group_by=_TOGETHER), waves)
        self._groups = Counter(vm.place.group for vm in heard.values())
        self._missing = missing
        self.late: set[str] = set()  # keys of VMs that were not heard in time before the last look
        self._changed: deque[ChangedPlace] = deque()  # by the last look, and not noted yet
        self._bytes = 0  # of all VMs: see ``MAX_HEARD_BYTES``
        for key, vm in heard.items():
            vm.place = one_place(vm.place)
            self._bytes += _bytes_of(key, vm)

    def expect(self, vms: Expected, now: float, patience: float) -> None:
        """Expect exactly these VMs, which are not heard from.

        ``patience``: the seconds after which they are missing. For VMs that were expected before,
        the time continues.
        """
        for key, (name, place) in vms.items():
            if key not in self.heard:
                self._add(key, Heard(name, now, patience / INTERVALS, place))
        for key in self.heard.keys() - vms.keys():
            self._forget(key)

    def hear(self, record: Beat | Report, now: float) -> None:
        """Note a record of a VM: it is alive.

        Raises ``PoisonError`` if too many VMs are known to add this one.
        """
        key = record.place.group + record.vm
        vm = self.heard.get(key)
        if isinstance(record, Beat):
            vm = self._hear_beat(key, vm, record, now)
        if vm is not None:
            vm.at = max(vm.at, now)

    def _hear_beat(self, key: str, vm: Heard | None, beat: Beat, now: float) -> Heard:
        """Keep what a heartbeat says of its VM. Raises ``PoisonError`` if there is no room."""
        group = beat.place.group
        heard = Heard(
            name=intern(beat.vm_name or beat.vm),  # stories have the same string
            at=now,
            interval=min(max(beat.interval, SHORTEST_INTERVAL), LONGEST_INTERVAL),
            place=beat.place,
        )
        if vm is None:
            is_full = len(self.heard) >= MAX_HEARD or self._groups[group] >= MAX_HEARD_OF_GROUP
            if is_full or self._bytes + _bytes_of(key, heard) > MAX_HEARD_BYTES:
                raise PoisonError("too_many", f"VMs in the group {group}")
            self._add(key, heard)
            return heard

        vm.interval = heard.interval
        place = beat.place.completed_by(vm.place)
        if place != vm.place:
            self._move(key, vm, place)
        return vm

    def _move(self, key: str, vm: Heard, place: Place) -> None:
        """Note the new place or tags of a VM. Raises ``PoisonError`` if there is no room."""
        moved = replace(vm, place=place)
        growth = _bytes_of(key, moved) - _bytes_of(key, vm)
        if growth > 0 and self._bytes + growth > MAX_HEARD_BYTES:
            raise PoisonError("too_many", f"tags of VMs in the group {place.group}")
        self._bytes += growth
        vm.place = place

    def _add(self, key: str, vm: Heard) -> None:
        self.heard[key] = vm
        self._groups[vm.place.group] += 1
        self._bytes += _bytes_of(key, vm)

    def _forget(self, key: str) -> None:
        vm = self.heard.pop(key)
        self._groups[vm.place.group] -= 1
        self._bytes -= _bytes_of(key, vm)

    def look(self, now: float, unwatched: float, deleted: set[str], explained: set[str]) -> None:
        """Find the VMs that are silent now, and those that are back; ``note_next`` notes them.

        ``unwatched``: the seconds before ``now`` in which the hub was not read; they do not count.
        ``deleted``: VMs that an event has deleted. ``explained``: VMs whose silence an event under
        way explains.
        """
        silent: dict[Place, list[Heard]] = {}
        self.late = set()
        for key, vm in list(self.heard.items()):
            vm.at = min(now, vm.at + unwatched)
            is_late = now - vm.at > INTERVALS * vm.interval
            if is_late:
                self.late.add(key)
                if key in deleted or self._is_forgotten(vm, now):
                    self._forget(key)
                    continue

            vm.silent = is_late and (vm.silent or key not in explained)
            if vm.silent:
                silent.setdefault(vm.place, []).append(vm)
        self._find_changed(silent)

    def _is_forgotten(self, vm: Heard, now: float) -> bool:
        """Whether a VM has been silent for so long that it was probably deleted."""
        if self._missing:
            return False  # the inventory decides which VMs there are
        return now - vm.at > FORGET_SECONDS

    def _find_changed(self, silent: dict[Place, list[Heard]]) -> None:
        """Find the places whose VMs may have fallen silent, or be back."""
        stories = self._stories()
        new_places = [place for place in silent if place not in stories]
        groups: dict[str, set[VmGroup]] = {}  # of the new places, by region
        for place in new_places:
            groups.setdefault(place.region.casefold(), set()).add(place.vm_group)

        self._changed.clear()
        for place in {**stories, **silent}:
            region = place.region.casefold()
            self._changed.append(
                ChangedPlace(
                    place=place,
                    story=stories.get(place),
                    silent=silent.get(place, []),
                    with_others=len(groups.get(region, ())) > 1,
                )
            )

    @property
    def has_changed(self) -> bool:
        """Whether places that the last look has found are still to be noted."""
        return bool(self._changed)

    def note_next(self, now: float) -> None:
        """Note the silent VMs of the next place, or that they are back."""
        changed = self._changed.popleft()
        names = tuple(sorted(vm.name for vm in changed.silent))
        story = changed.story
        if story is None:
            story = self._begin(changed, names, now)
        elif names == _silent_in(story):
            return

        if names:
            story.event = replace(story.event, resources=names)
            story.claim = Standing.STARTED
            story.standing = Standing.STARTED
            story.over = None
        else:  # the story keeps the names of those that are back
            story.claim = Standing.FINISHED
            story.standing = Standing.FINISHED
            story.over = from_unix(now)
        self.waves.note(story, now)

    def _stories(self) -> dict[Place, Story]:
        """Return the stories of silent VMs by their place."""
        stories: dict[Place, Story] = {}
        for wave in self.waves.open.values():
            for story in wave.stories.values():
                stories[story.place] = story
        return stories

    def _begin(self, changed: ChangedPlace, names: tuple[str, ...], now: float) -> Story:
        """Begin the story of the silent VMs of a place."""
        place = changed.place
        kind = "silent"
        description = None
        if self._missing:
            kind = "missing"
            description = MISSING

        began = from_unix(min(vm.at for vm in changed.silent))
        digest = sha256(repr(place).encode())[:8]  # several places may fall silent at once
        event = Event(
            event_id=f"{kind}-{now:.0f}-{digest}",
            event_type=SILENT,
            event_status=STARTED,
            resource_type="VirtualMachine",
            resources=names,
            description=description,
        )
        source = (began, "", "")
        story = Story(
            event=event,
            place=place,
            first_seen=began,
            group=place.group,
            sender="",
            newest=source,
            dated=source,
            started=began,
        )
        story.labels = self._labels(story, with_others=changed.with_others)
        return story

    def _labels(self, story: Story, *, with_others: bool) -> tuple[str, ...]:
        """Return the key of the wave of a new story: that of its group, or of its region."""
        labels = self.waves.labels(story)
        if labels in self.waves.open or not story.place.region:
            return labels

        labels_of_region = self.waves.labels_of_region(story)
        if with_others or labels_of_region in self.waves.open:
            return labels_of_region
        return labels


def _silent_in(story: Story) -> tuple[str, ...]:
    """Return the names of the VMs that are silent according to a story."""
    if story.standing is Standing.STARTED:
        return story.event.resources
    return ()
