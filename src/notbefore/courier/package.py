"""``RunningPackage``: the code that runs, kept while ``pip install -U`` puts other code in its place.

A courier is started for each burst of deliveries, so it would be of the new version: with another schema, other orders,
and in the middle of an installation of both. Where the system can (Linux), the agent keeps a copy of its package in
memory, and starts its couriers from that once the package on disk is another one. It costs no memory of the process and
writes nothing to a disk. The libraries that the package uses are not copied.
"""

import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

import notbefore
from notbefore import __version__

COPY: Final = 3  # the file descriptor of the copy in a courier
FROM_DISK: Final = ("-m", "notbefore.courier")
_BOOT: Final = f"""
import runpy, sys
sys.path.insert(0, "/proc/self/fd/{COPY}")
import notbefore
notbefore.__version__ = sys.argv.pop(1)
runpy.run_module("notbefore.courier", run_name="__main__")
"""
FROM_COPY: Final = ("-c", _BOOT, __version__)

log = logging.getLogger("notbefore.courier.package")


class RunningPackage:
    """Only the main thread calls it, except for ``replaced``. Make it before anything is imported late."""

    def __init__(self, place: Path = Path(notbefore.__file__)) -> None:
        self.replaced = ""  # what is on disk now and what runs, in words; empty while they are the same
        self._place = place
        self._seen = self._identity()
        self._copy: int | None = None
        self._copier: int | None = None  # the process that writes the copy

    def keep(self) -> None:
        """Begin to copy the package; waits for nothing."""
        if not hasattr(os, "memfd_create") or not hasattr(os, "posix_spawn"):
            return
        try:
            self._copy = os.memfd_create("notbefore")
            command = [sys.executable, "-P", "-m", "notbefore.courier.copy_package"]
            actions = [(os.POSIX_SPAWN_DUP2, self._copy, 1)]
            self._copier = os.posix_spawn(sys.executable, command, dict(os.environ), file_actions=actions)
        except OSError as error:
            self._fail(str(error))

    def look(self) -> bool:
        """Look at the disk; returns whether the package has just been replaced, or removed."""
        self._reap()
        before = self.replaced
        if not before and self._identity() == self._seen:
            return False
        from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 - it is heavy, and rarely needed

        try:  # again and again: an installation that was half done at the last look may be complete
            on_disk = version("azure-notbefore")
            if on_disk == __version__:
                found = f"the package ({__version__}) was installed again after the start"
            else:
                found = f"the package on disk ({on_disk}) is not the one that runs ({__version__})"
        except PackageNotFoundError:
            found = f"the package of this agent ({__version__}) is not on disk any more"
        self.replaced = f"{found}: restart the agent"
        if self.replaced != before:
            until = "deliveries go on until then" if self._copy is not None else "deliveries may wait until then"
            log.warning("%s; %s", self.replaced, until)
        return not before

    @property
    def copy(self) -> int | None:
        """The file descriptor to start a courier from, once the package on disk is another one; else ``None``."""
        return self._copy if self.replaced else None

    def close(self) -> None:
        """Close the copy."""
        if self._copy is not None:
            os.close(self._copy)
            self._copy = None

    def _identity(self) -> tuple[int, int] | None:
        with suppress(OSError):  # an installation makes new files, whatever it writes into them
            found = self._place.stat()
            return found.st_dev, found.st_ino
        return None

    def _reap(self) -> None:
        if self._copier is None:
            return
        pid, status = os.waitpid(self._copier, os.WNOHANG)
        if pid:
            self._copier = None
            if status:
                self._fail(f"exit code {os.waitstatus_to_exitcode(status)}")

    def _fail(self, why: str) -> None:
        log.warning("the package could not be copied (%s): after an upgrade, restart the agent at once", why)
        self.close()
