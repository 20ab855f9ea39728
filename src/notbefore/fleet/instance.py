"""``FleetInstance``: the process of ``notbefore fleet``. It makes its parts, joins them, and supervises them.

Threads: main (signals, the courier, systemd), consumer (the hub, the fold, the outbox), stdout (records), and those of
the HTTP server.
"""

import logging
import select
import signal
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

from notbefore import __version__
from notbefore.agent.clock import Clock
from notbefore.agent.courier import CourierManager, CourierParts
from notbefore.agent.package import RunningPackage
from notbefore.agent.stdout import StdoutWriter
from notbefore.agent.systemd import SystemdNotifier
from notbefore.config.model import Config
from notbefore.delivery.orders import Orders
from notbefore.errors import ConfigError
from notbefore.fleet.checkpoints import FileSnapshots, make_blob_snapshots
from notbefore.fleet.consumer import Consumer
from notbefore.fleet.history import History, history_directory
from notbefore.fleet.inventory import Inventory
from notbefore.fleet.outbox import FleetOutbox
from notbefore.fleet.view import FleetView, Stored
from notbefore.store.state import Store
from notbefore.web.access import access
from notbefore.web.app import make_fleet_app
from notbefore.web.server import HttpServer

STOP_PATIENCE: Final = 20.0  # seconds for the consumer to write its snapshots and let go of its partitions
HISTORY_PATIENCE: Final = 2.0  # seconds for the history to be written
RETRY_INTERVAL: Final = 2.0  # seconds between attempts to write a state that could not be written

log = logging.getLogger("notbefore.fleet")


class FleetInstance:
    """Runs until SIGTERM or SIGINT. Raises ``StoreError``, ``ListenError`` or ``ConfigError`` where it cannot start."""

    def __init__(self, config: Config) -> None:
        if config.fleet is None:
            raise ConfigError("the configuration has no section `fleet`: it names the hub that is to be read")
        self._config = config
        self._clock = clock = Clock()
        self._reader, self._writer = socket.socketpair()  # wakes the main thread
        for end in (self._reader, self._writer):
            end.settimeout(0)
        self._store = Store(Path(config.state.dir), config.state.history_max_bytes)
        self._outbox = self._store.reader()
        self._package = RunningPackage()
        self._couriers = CourierManager(
            self._orders(config), clock, self._next_due, self._poke, CourierParts(self._package, self._store)
        )
        self._stdout = StdoutWriter()
        self._fleet_outbox = FleetOutbox(self._store, config.routing, self._stdout, self._couriers.wake)
        if config.fleet.checkpoints is not None:  # by now another instance may have what waits here: the snapshots know
            self._fleet_outbox.leave(None)
        checkpoints, fleet = config.fleet.checkpoints, config.fleet
        directory = self._store.path.with_name("partitions")
        keep = fleet.history.keep
        self._history = History(history_directory(config), keep.seconds if keep is not None else None)
        inventory = Inventory(Path(fleet.inventory_file)) if fleet.inventory_file is not None else None
        self._consumer = Consumer(
            fleet,
            lambda credential: (
                make_blob_snapshots(checkpoints, credential) if checkpoints is not None else FileSnapshots(directory)
            ),
            self._fleet_outbox,
            self._history,
            inventory,
        )
        self._thread = threading.Thread(target=self._consumer.run, name="consumer", daemon=True)
        self._view = FleetView(
            config,
            self._consumer,
            Stored(self._store, self._fleet_outbox, self._outbox, self._history, inventory),
            lambda: self._couriers.figures,
        )
        self._server = HttpServer(config.server.listen, make_fleet_app(self._view), access(config.server))
        self._systemd = SystemdNotifier()
        self._retried = clock.monotonic()

    def run(self) -> int:
        """Read and notify; returns the exit code."""
        numbers = (signal.SIGTERM, signal.SIGINT)
        previous = {number: signal.signal(number, lambda *_: None) for number in numbers}
        previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        try:
            self._server.start()
            log.info("notbefore %s: reading the fleet's changes, serving %s", __version__, self._server.url)
            self._stdout.start()
            self._history.start()
            self._thread.start()
            self._systemd.ready()
            self._package.keep()
            stop = False
            while not stop and self._thread.is_alive():
                self._couriers.tick()
                self._look_after_store()
                self._systemd.beat(self._view.status_line(), alive=self._view.health().ok)
                stop = self._wait_for_stop(min(self._couriers.patience, self._systemd.patience, 5.0))
            return int(not stop)  # the consumer has ended by itself: an error that nobody foresaw
        finally:
            self._stop()
            signal.set_wakeup_fd(previous_fd)
            for number, handler in previous.items():
                signal.signal(number, handler)
            self._reader.close()
            self._writer.close()

    def _look_after_store(self) -> None:
        self._store.look_after(writes=self._couriers.in_trouble)
        if self._store.degraded and self._clock.monotonic() - self._retried >= RETRY_INTERVAL:
            self._retried = self._clock.monotonic()
            self._store.retry()

    def _next_due(self) -> float | None:
        self._outbox.refresh()
        return self._outbox.next_due

    def _poke(self) -> None:
        with suppress(OSError):
            self._writer.send(b"\0")  # no signal has the number 0

    def _orders(self, config: Config) -> Orders:
        return Orders(
            state_file=str(self._store.path.absolute()),
            spare_file=str(self._store.spare_path),
            sinks=config.sinks,
            messages=config.messages,
            hidden=config.hidden,
            log_format=config.log.format,
            log_level=config.log.level,
            confirm=True,
        )

    def _wait_for_stop(self, patience: float) -> bool:
        ready, _, _ = select.select([self._reader.fileno(), *self._couriers.descriptors], [], [], patience)
        if self._reader.fileno() not in ready:
            return False
        with suppress(BlockingIOError):
            for number in self._reader.recv(64):
                if number in (signal.SIGTERM, signal.SIGINT):
                    log.info("%s: stopping", signal.Signals(number).name)
                    return True
        return False

    def _stop(self) -> None:
        self._systemd.stopping()
        self._couriers.stop(self._wait_for_stop)  # before the consumer, which marks what is accepted meanwhile
        self._consumer.stop()
        if self._thread.is_alive():
            self._thread.join(STOP_PATIENCE)
        self._history.close(HISTORY_PATIENCE)
        self._outbox.close()
        self._stdout.stop(1.0)
        self._server.stop()
        self._store.close()
        self._package.close()
