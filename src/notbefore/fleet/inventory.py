"""``Inventory``: the VMs that are to be heard from: a file of names, or what ``az graph query`` exports as JSON."""

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct, field

from notbefore.core.document import MAX_NAME
from notbefore.fleet.reading import Place
from notbefore.fleet.silence import ExpectedVm

MAX_BYTES: Final = 64 * 1024 * 1024  # of the file: a row of `az graph query` with all its properties is some 5 KB
MAX_VMS: Final = 200_000
OF_VMS: Final = "virtualmachines"  # the end of the type of a VM, in a scale set as well
_INSTANCE: Final = re.compile(r"/virtualmachinescalesets/([^/]+)/virtualmachines/(\d+)/?$", re.IGNORECASE)
_SCALE_SET: Final = re.compile(r"/virtualmachinescalesets/([^/]+)", re.IGNORECASE)

log = logging.getLogger("notbefore.fleet.inventory")

Text = Annotated[str, Meta(max_length=MAX_NAME * 8)]


class _ScaleSet(Struct):
    id: Text = ""


class _Properties(Struct):
    scale_set: _ScaleSet | None = field(default=None, name="virtualMachineScaleSet")  # of a flexible scale set


class _Row(Struct):
    name: Text
    id: Text = ""
    type: Text = ""
    resource_group: Text = field(default="", name="resourceGroup")
    subscription: Text = field(default="", name="subscriptionId")
    location: Text = ""
    zones: list[Text] | None = None
    properties: _Properties | None = None


class _Export(Struct):
    data: list[_Row]
    total_records: int | None = None


def read_inventory(data: bytes) -> dict[str, ExpectedVm]:
    """The VMs of a file, by their keys; raises ``ValueError`` that says what is wrong with it.

    JSON is what ``az graph query`` writes: an object with ``data``, or the list alone. Each row has a ``name``; the
    other columns say where the VM is. Rows of another ``type`` are left out. Anything else is VMs, one a line: NAME,
    RESOURCE_GROUP/NAME or SUBSCRIPTION/RESOURCE_GROUP/NAME; ``#`` begins a comment.
    """
    if len(data) > MAX_BYTES:
        raise ValueError(f"{len(data)} bytes, expected {MAX_BYTES} at most")
    found = _of_json(data) if data.lstrip()[:1] in (b"{", b"[") else _of_lines(data)
    if not found:
        raise ValueError("it names no VM")
    if len(found) > MAX_VMS:
        raise ValueError(f"{len(found)} VMs, expected {MAX_VMS} at most")
    named = Counter(one.key for one in found)
    twice = next((one for one in found if named[one.key] > 1), None)
    if twice is not None:
        raise ValueError(
            f"{twice.key} stands there {named[twice.key]} times: write RESOURCE_GROUP/NAME or"
            " SUBSCRIPTION/RESOURCE_GROUP/NAME, so that VMs of one name are distinguished"
        )
    return {one.key: one for one in found}


def _of_lines(data: bytes) -> list[ExpectedVm]:
    names = [line.partition("#")[0].strip() for line in data.decode("utf-8-sig").splitlines()]
    for number, name in enumerate(names, start=1):
        if len(name) > MAX_NAME or not name.isprintable() or " " in name:
            raise ValueError(f"line {number}: expected the name of a VM, got {name[:40]!r}")
    return [_of_line(name) for name in names if name]


def _of_line(line: str) -> ExpectedVm:
    place, _, name = line.rpartition("/")
    subscription, _, group = place.rpartition("/")
    return ExpectedVm(name, Place(subscription, group))


def _of_json(data: bytes) -> list[ExpectedVm]:
    export = msgspec.json.decode(data, type=_Export | list[_Row])
    rows = export if isinstance(export, list) else export.data
    if not isinstance(export, list) and (export.total_records or 0) > len(rows):
        raise ValueError(
            f"it has {len(rows)} of {export.total_records} rows: `az graph query` gives 100 at a time, and 1,000 with"
            " --first 1000; join the answers that --skip-token brings"
        )
    return [_expected(row) for row in rows if not row.type or row.type.lower().endswith(OF_VMS)]


def _expected(row: _Row) -> ExpectedVm:
    name, scale_set = row.name, ""
    instance = _INSTANCE.search(row.id)
    if instance is not None:  # of a uniform scale set: IMDS calls it SET_NUMBER
        scale_set = instance[1]
        name = f"{scale_set}_{instance[2]}" if name.isdigit() else name
    elif row.properties is not None and row.properties.scale_set is not None:
        found = _SCALE_SET.search(row.properties.scale_set.id)
        scale_set = found[1] if found is not None else ""
    zone = row.zones[0] if row.zones else ""
    return ExpectedVm(name, Place(row.subscription, row.resource_group, row.location, scale_set), zone)


class Inventory:
    """The file, read again when it changes. One that cannot be read is named, and what was read before stays."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None  # of the file that was read last
        self._trouble = ""
        self.vms: dict[str, ExpectedVm] | None = None  # None until the file could be read once
        self.failures = 0

    def look(self) -> None:
        """Read the file if it is another one than at the last look."""
        try:
            status = self._path.stat()
            seen = (status.st_mtime_ns, status.st_size, status.st_ino)
            if seen == self._seen:
                return
            with self._path.open("rb") as file:
                vms = read_inventory(file.read(MAX_BYTES + 1))
        except (OSError, ValueError) as error:  # msgspec's errors and UnicodeDecodeError are ValueErrors
            self._fail(str(error))
            return
        self._seen, self._trouble, self.vms = seen, "", vms
        log.info("%s: %d VMs are to be heard from", self._path, len(vms))

    def _fail(self, why: str) -> None:
        self.failures += 1
        if why != self._trouble:
            kept = "nothing is compared" if self.vms is None else f"the {len(self.vms)} VMs that it named before stay"
            log.warning("the inventory %s cannot be read (%s): %s", self._path, why, kept)
        self._trouble = why


def not_heard(vms: Mapping[str, ExpectedVm], heard: Iterable[str]) -> dict[str, ExpectedVm]:
    """The VMs of an inventory that are none of those that were heard from, which are given by their whole keys."""
    known = {end for key in heard for end in _ends(key)}
    return {key: vm for key, vm in vms.items() if key not in known}


def _ends(key: str) -> tuple[str, str, str]:
    """What an inventory may call a VM: with its subscription and group, with its group, or by its name alone."""
    shorter = key.partition("/")[2]
    return key, shorter, shorter.rpartition("/")[2]
