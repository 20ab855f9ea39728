"""``Inventory``: the file of the expected VMs, one per line."""

import logging
import re
from pathlib import Path
from typing import Final

from notbefore.config.regular_file import open_file
from notbefore.core.document import MAX_NAME
from notbefore.fleet.hub_records import Place, one_place
from notbefore.fleet.silence import Expected
from notbefore.web.access import Signature, signature

MAX_FILE_BYTES: Final = 64 * 1024 * 1024
MAX_VMS: Final = 200_000
MAX_LINE: Final = 4 * MAX_NAME  # characters
VM: Final = re.compile("([^/ ]+)/([^/ ]+)/([^/ ]+)")

log = logging.getLogger("notbefore.fleet.inventory")


def read_inventory(data: bytes) -> Expected:
    """Read the VMs of a file; raises a ``ValueError`` that names the mistake.

    A line has up to three columns, separated by tabs: SUBSCRIPTION/RESOURCE_GROUP/NAME; the region;
    the scale set. ``#`` begins a comment.
    """
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"{len(data)} bytes, expected {MAX_FILE_BYTES} at most")

    vms: Expected = {}
    for number, line in enumerate(data.decode("utf-8-sig").splitlines(), start=1):
        text = line.partition("#")[0].strip()
        if text:
            _read_line(text, number, vms)
    if not 0 < len(vms) <= MAX_VMS:
        raise ValueError(f"{len(vms)} VMs, expected 1 to {MAX_VMS}")
    return vms


def _read_line(text: str, number: int, vms: Expected) -> None:
    """Add the VM of a line. ``number``: the line's, for an error."""
    vm, region, scale_set, *more = [*text.split("\t"), "", ""]
    parts = VM.fullmatch(vm)
    if any(more) or len(text) > MAX_LINE or parts is None or not vm.isprintable():
        raise ValueError(
            f"line {number}: expected SUBSCRIPTION/RESOURCE_GROUP/NAME, got {text[:40]!r}"
        )
    subscription, group, name = parts.groups()
    vms[vm.casefold()] = name, one_place(Place(subscription, group, region, scale_set))


class Inventory:
    """The file, read again when it changes. While it cannot be read, the previous content stays."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # of the file when it was last read; ``never`` before, as no file has the signature ``None``
        self._signature: Signature | str = "never"
        self.vms: Expected | None = None  # ``None`` until the file was read once

    def look(self) -> None:
        """Read the file if it has changed since the last call.

        Raises ``OSError`` or ``ValueError``.
        """
        current = signature(self._path)
        if current == self._signature:
            return

        with open_file(self._path) as file:
            data = file.read(MAX_FILE_BYTES + 1)
        self._signature = current  # a wrong file is reported only once
        self.vms = read_inventory(data)
        log.info("%s: %d VMs are expected to report", self._path, len(self.vms))
