"""``SystemdNotifier`` sends the agent's state to systemd, like ``sd_notify``: ready, reloading,
stopping, alive.

It sends nothing without ``NOTIFY_SOCKET`` in the environment. No method raises, or waits longer
than a second.
"""

import logging
import math
import os
import socket
import time
from collections.abc import Mapping
from typing import Final

SEND_TIMEOUT: Final = 1.0  # seconds; systemd reads at once, unless it hangs
PINGS: Final = 4  # pings within the watchdog's timeout

log = logging.getLogger("notbefore.process.systemd")


class SystemdNotifier:
    """Call ``ready`` once, then ``notify`` from the supervising thread, within ``patience`` seconds
    each time.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        if self._address.startswith("@"):  # an abstract name
            self._address = "\0" + self._address.removeprefix("@")
        self._ping_interval = _watchdog_seconds(environment) / PINGS
        self._last_ping = time.monotonic()
        self._status = ""

    @property
    def patience(self) -> float:
        """Seconds until ``notify`` has to be called at the latest."""
        return max(0.0, self._last_ping + self._ping_interval - time.monotonic())

    def ready(self) -> None:
        """Report that the agent serves and its state is open; also sent after a reload."""
        self._send("READY=1")

    def reloading(self) -> None:
        """Report that the agent reads its configuration again."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """Report that the agent is stopping."""
        self._send("STOPPING=1\nSTATUS=stopping")

    def notify(self, status: str, *, alive: bool) -> None:
        """Send the status if it has changed; ping the watchdog while the agent is ``alive``."""
        line = " ".join(status.split())  # a line end would begin another assignment
        if line != self._status:
            self._status = line
            self._send(f"STATUS={line}")
        if self.patience <= 0:
            self._last_ping = time.monotonic()
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
    """Return the seconds without a ping after which systemd considers this process dead.

    Infinite without a watchdog.
    """
    own_pid = str(os.getpid())
    if environment.get("WATCHDOG_PID", own_pid) != own_pid:
        return math.inf
    try:
        microseconds = int(environment.get("WATCHDOG_USEC", ""))
    except ValueError:
        return math.inf
    if microseconds <= 0:
        return math.inf
    return microseconds / 1_000_000
