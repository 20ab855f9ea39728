"""``SystemdNotifier``: the agent's state for systemd, as ``sd_notify`` sends it: ready, reloading, stopping, alive.

Without ``NOTIFY_SOCKET`` in the environment nothing is sent. Nothing here raises, or waits longer than a second.
"""

import logging
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

SEND_TIMEOUT: Final = 1.0  # seconds; systemd reads at once, unless it hangs itself
PINGS: Final = 4  # of the watchdog in the time that it allows

log = logging.getLogger("notbefore.process.systemd")


class SystemdNotifier:
    """``ready`` once, then ``notify`` from the supervising thread; ``patience`` says when the next one is needed."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        given = environment.get("NOTIFY_SOCKET", "")
        self._address = f"\0{given[1:]}" if given.startswith("@") else given  # systemd writes abstract names with ``@``
        self._every = _watchdog_seconds(environment) / PINGS
        self._pinged = time.monotonic()
        self._status = ""

    @property
    def patience(self) -> float:
        """Seconds until ``notify`` is to be called at the latest."""
        return max(0.0, self._pinged + self._every - time.monotonic())

    def ready(self) -> None:
        """The agent serves, and its state is open; also sent when a reload is over."""
        self._send("READY=1")

    def reloading(self) -> None:
        """The agent reads its configuration again."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """The agent has been asked to stop, and does."""
        self._send("STOPPING=1\nSTATUS=stopping")

    def notify(self, status: str, *, alive: bool) -> None:
        """Send the status, if it is another than the last one; ping the watchdog while ``alive``."""
        status = " ".join(status.split())  # a line end would begin another assignment
        if status != self._status:
            self._status = status
            self._send(f"STATUS={status}")
        if self.patience <= 0:
            self._pinged = time.monotonic()
            if alive:
                self._send("WATCHDOG=1")

    def _send(self, text: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(SEND_TIMEOUT)
                sender.sendto(text.encode(), self._address)
        except OSError as error:
            log.debug("systemd could not be sent %r: %s", text, error)


def _watchdog_seconds(environment: Mapping[str, str]) -> float:
    """Seconds after which systemd counts this process as dead; infinite without a watchdog for it."""
    if environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid()):
        with suppress(ValueError):
            seconds = int(environment.get("WATCHDOG_USEC", "")) / 1_000_000
            return seconds if seconds > 0 else float("inf")
    return float("inf")
