"""``FleetInstance``: the process of ``notbefore fleet``. It makes its parts, joins them, and supervises them.

Threads: main (signals, the courier, systemd), consumer (the hub, the fold, the outbox), stdout (records), and those of
the HTTP server.
"""

import logging
import threading
from functools import partial
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from notbefore import __version__
from notbefore.config.fleet import FleetConfig
from notbefore.config.model import Config
from notbefore.courier.supervisor import CourierManager, make_orders
from notbefore.errors import ConfigError
from notbefore.fleet.checkpoints import FileSnapshots, Snapshots
from notbefore.fleet.consumer import Consumer
from notbefore.fleet.couriered import CourieredStore
from notbefore.fleet.history import History, history_directory
from notbefore.fleet.inventory import Inventory
from notbefore.fleet.outbox import FleetOutbox
from notbefore.fleet.view import FleetView, Stored
from notbefore.process.clock import Clock
from notbefore.process.main_thread import MainThread, exit_code
from notbefore.process.stdout import StdoutWriter
from notbefore.process.store_care import StoreCare
from notbefore.process.systemd import SystemdNotifier
from notbefore.store.state import Store
from notbefore.web.access import access
from notbefore.web.app import make_fleet_app
from notbefore.web.server import HttpServer

STOP_PATIENCE: Final = 20.0  # seconds for the consumer to write its snapshots and let go of its partitions
HISTORY_PATIENCE: Final = 2.0  # seconds for the history to be written

log = logging.getLogger("notbefore.fleet")


class FleetInstance:
    """Runs until SIGTERM or SIGINT. Raises ``StoreError``, ``ListenError`` or ``ConfigError`` where it cannot start."""

    def __init__(self, config: Config) -> None:
        if config.fleet is None:
            raise ConfigError("the configuration has no section `fleet`: it names the hub that is to be read")
        self._config = config
        clock = Clock()
        self._main = MainThread()
        self._store = Store(Path(config.state.dir), config.state.history_max_bytes)
        self._outbox = self._store.reader()
        self._store_care = StoreCare(self._store, self._outbox, clock)
        once = [name for name, sink in config.sinks.items() if not sink.settings.repeatable]
        self._couriered = CourieredStore(self._store, self._outbox, once)
        self._couriers = CourierManager(replace(make_orders(config), peers=None), self._couriered, self._main.wake)
        self._stdout = StdoutWriter()
        self._fleet_outbox = FleetOutbox(self._store, config.routing, self._stdout, self._couriers.wake)
        if config.fleet.checkpoints is not None:  # by now another instance may have what waits here: the snapshots know
            self._fleet_outbox.leave(None)
        fleet, keep = config.fleet, config.fleet.history.keep
        self._history = History(history_directory(config), keep.seconds if keep is not None else None)
        inventory = Inventory(Path(fleet.inventory_file)) if fleet.inventory_file is not None else None
        self._consumer = Consumer(
            fleet,
            partial(_snapshots, fleet, self._store.path.with_name("partitions")),
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

    def run(self) -> int:
        """Read and notify; returns the exit code."""
        with self._main:
            try:
                self._start()
                ended_by_itself = not self._supervise()  # the consumer: an error that nobody foresaw
            finally:
                self._stop()
        return exit_code(int(ended_by_itself), hangs=self._store.hangs)

    def _start(self) -> None:
        self._server.start()
        log.info("notbefore %s: reading the fleet's changes, serving %s", __version__, self._server.url)
        self._stdout.start()
        self._history.start()
        self._thread.start()
        self._systemd.ready()

    def _supervise(self) -> bool:
        """Until a signal stops the process, or the consumer has ended; returns whether it was a signal."""
        stop = False
        while not stop and self._thread.is_alive():
            self._couriers.tick()
            self._store_care.tick(trouble=self._couriered.in_trouble)
            self._systemd.notify(self._view.status_line(), alive=self._view.health().ok)
            patience = min(self._couriers.patience, self._systemd.patience, 5.0)
            stop = self._main.wait(patience, self._couriers.descriptors, self._couriers.unsent)
            stop = stop or bool(self._couriers.successor)
        return stop

    def _stop(self) -> None:
        self._systemd.stopping()
        self._couriers.stop(self._main.wait)  # before the consumer, which marks what is accepted meanwhile
        self._consumer.stop()
        if self._thread.is_alive():
            self._thread.join(STOP_PATIENCE)
        self._history.close(HISTORY_PATIENCE)
        self._couriered.close()
        self._outbox.close()
        self._stdout.stop(1.0)
        self._server.stop()
        self._store.close()


def _snapshots(fleet: FleetConfig, directory: Path, credential: Any) -> Snapshots:
    if fleet.checkpoints is None:
        return FileSnapshots(directory)
    from notbefore.fleet.blob_snapshots import make_blob_snapshots  # noqa: PLC0415 - 27 MB that files do not need

    return make_blob_snapshots(fleet.checkpoints, credential)
