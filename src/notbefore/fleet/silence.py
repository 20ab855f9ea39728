"""``Silence``: which VMs were heard from, and which have fallen silent without an event that explains it. Pure.

A VM is known from its first heartbeat on. It is silent after three of its intervals without any record of it. The
silent VMs of one scale set or resource group are one wave, of the type ``Silent``: it starts with the first of them,
and is over once all are heard from again. The VMs of an inventory that are not heard from at all are missing, by the
same rules. Times are Unix seconds of the hub's clock.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from sys import intern
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from notbefore.core.change import MISSING, SILENT
from notbefore.core.digest import sha256
from notbefore.core.document import STARTED as STATUS_STARTED
from notbefore.core.document import Event
from notbefore.fleet.merge import FINISHED, STARTED, Story, from_unix
from notbefore.fleet.reading import NOWHERE, Beat, Place, Report
from notbefore.fleet.waves import Grouping, Notification, Wave, Waves

INTERVALS: Final = 3  # without a sign of life, after which a VM is silent
FORGET_SECONDS: Final = 86_400.0  # after which a silent VM is no longer expected: somebody has deleted it
_TOGETHER: Final = ("subscription", "resource_group", "scale_set")


class Heard(Struct, array_like=True):
    """A VM that has sent a heartbeat."""

    name: str
    at: float  # the last sign of life
    interval: float  # seconds between its heartbeats
    place: Place  # with its tags
    zone: str = ""
    silent: bool = False
    missing: bool = False  # it is to be heard from, and is not


class ExpectedVm(Struct, frozen=True):
    """A VM of the inventory."""

    name: str
    place: Place = Place()
    zone: str = ""


class Silence:
    """Of one partition. ``gone`` says whether a VM was deleted by an event, ``explained`` whether one is under way.

    ``missing``: it is about VMs of an inventory, which ``expect`` gives, and not about those that were heard from.
    """

    def __init__(
        self,
        grouping: Grouping,
        gone: Callable[[str], bool],
        explained: Callable[[str], bool],
        *,
        missing: bool = False,
    ) -> None:
        self.heard: dict[str, Heard] = {}
        self.fell_silent = 0  # VMs, since the last look at it
        self.waves = Waves(replace(grouping, group_by=_TOGETHER))
        self._stories: dict[Place, Story] = {}
        self._places: dict[Place, Place] = {}
        self._gone = gone
        self._explained = explained
        self._missing = missing
        self._changed: set[Place] = set()  # places where a missing VM is no longer expected, or was heard from

    def restore(self, waves: Iterable[Wave], heard: Iterable[Heard]) -> None:
        """Go on with what another instance has seen."""
        self.waves.restore(waves)
        for wave in self.waves.open.values():
            for story in wave.stories.values():
                self._stories[story.place] = story
        self.heard = {one.name.casefold(): one for one in heard if one.missing == self._missing}
        for one in self.heard.values():
            one.place = self.one_of(one.place)

    def expect(self, vms: Mapping[str, ExpectedVm], now: float, patience: float) -> None:
        """These are to be heard from, by their names in lower case, and are not: missing in ``patience`` seconds.

        The time of those that were expected before goes on.
        """
        for key, vm in vms.items():
            if key not in self.heard:
                self.heard[key] = Heard(vm.name, now, patience / INTERVALS, vm.place, vm.zone, missing=True)
        for key in self.heard.keys() - vms.keys():
            one = self.heard.pop(key)
            if one.silent:
                self._changed.add(one.place)

    def hear(self, found: Beat | Report, now: float) -> None:
        """A record of a VM: it is alive."""
        known = self.heard.get(found.vm)
        if known is not None:
            known.at = max(known.at, now)
            if isinstance(found, Beat):
                known.interval = found.interval
                self._move(known, found)
        elif isinstance(found, Beat):
            place = self.one_of(found.place)
            name = intern(found.vm_name or found.vm)  # stories have the same
            self.heard[intern(found.vm)] = Heard(name, now, found.interval, place, found.zone)

    def _move(self, known: Heard, found: Beat) -> None:
        """Its tags may be others by now, and a VM of the same name may be elsewhere."""
        if found.place not in (known.place, NOWHERE):
            if known.silent:
                self._changed.add(known.place)
            known.place, known.zone = self.one_of(found.place), found.zone

    def one_of(self, place: Place) -> Place:
        """The same place, once in memory for all its VMs."""
        return self._places.setdefault(place, place)

    def leave(self, vms: Iterable[str]) -> None:
        """These VMs are heard from in another partition now."""
        self._changed |= {one.place for key in vms if (one := self.heard.pop(key)).silent}

    def look(self, now: float, unwatched: float = 0.0) -> None:
        """See who has fallen silent by now, and who is back.

        ``unwatched``: seconds before ``now`` in which nothing could be heard; they are nobody's silence.
        """
        changed, self._changed = self._changed, set()
        if unwatched:
            for one in self.heard.values():
                one.at = min(now, one.at + unwatched)
        for key, one in list(self.heard.items()):
            late = now - one.at > INTERVALS * one.interval
            forgotten = not self._missing and now - one.at > FORGET_SECONDS
            if late and (self._gone(key) or forgotten):
                del self.heard[key]
                if one.silent:
                    changed.add(one.place)
            elif one.silent != late and not (late and self._explained(key)):
                one.silent = late
                self.fell_silent += late
                changed.add(one.place)
        for place in sorted(changed):  # whoever reads the same log notifies in the same order
            self._tell(place, now)

    def flush(self, now: float) -> Iterator[Notification]:
        """What is to be notified by now."""
        for wave, made in self.waves.flush(now):
            if wave.key not in self.waves.open:
                for story in wave.stories.values():
                    self._stories.pop(story.place, None)
            if made is not None:
                yield made

    @property
    def silent(self) -> list[Heard]:
        """The VMs that are silent now."""
        return [one for one in list(self.heard.values()) if one.silent]

    def _tell(self, place: Place, now: float) -> None:
        names = tuple(sorted(one.name for one in self.heard.values() if one.silent and one.place == place))
        story = self._stories.get(place)
        if story is None and not names:  # nobody was notified of it
            return
        if story is None:
            began = from_unix(
                min((one.at for one in self.heard.values() if one.silent and one.place == place), default=now)
            )
            kind, why = ("missing", MISSING) if self._missing else ("silent", None)
            where = sha256(repr(place).encode())[:8]  # several places of one wave may fall silent at once
            event = Event(f"{kind}-{now:.0f}-{where}", SILENT, STATUS_STARTED, "VirtualMachine", names, description=why)
            mark = (began, "", "")
            story = Story(event, place, "", began, mark, mark, started=began)
            self._stories[place] = story
        story.event = replace(story.event, resources=names or story.event.resources)
        story.claim = story.standing = STARTED if names else FINISHED
        story.over = None if names else from_unix(now)
        self.waves.note(story, now)
