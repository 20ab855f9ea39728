"""``FleetInstance``, the process of ``notbefore fleet``, creates and supervises its parts.

Threads: main (signals, the courier, systemd), consumer (the hub, the fold, the snapshots), stdout
(records), control (commands), and those of the HTTP server.
"""

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from notbefore import __version__
from notbefore.config.model import Config, FleetConfig
from notbefore.courier.sinks.event_hub import make_credential
from notbefore.courier.supervisor import Supervisor, make_orders
from notbefore.errors import ConfigError, StoreError
from notbefore.fleet.approver import FleetApprover
from notbefore.fleet.consumer import Consumer
from notbefore.fleet.desk import FleetDesk
from notbefore.fleet.fleet_view import FleetView
from notbefore.fleet.history import History
from notbefore.fleet.hub_clock import HubClock
from notbefore.fleet.inventory import Inventory
from notbefore.fleet.keeper import Parts
from notbefore.fleet.maintenance import MaintenanceProvider
from notbefore.fleet.outbox import FleetOutbox
from notbefore.fleet.snapshot_store import FileSnapshots, Snapshots
from notbefore.process.control_socket import ControlSocket
from notbefore.process.main_thread import MainThread, exit_at_once
from notbefore.process.stdout import StdoutWriter
from notbefore.process.systemd import SystemdNotifier
from notbefore.store.lock import OwnerLock
from notbefore.web.server import HttpServer

# seconds for the consumer to write its snapshots and let go of its partitions
HAND_OVER_PATIENCE: Final = 20.0
FLUSH_PATIENCE: Final = 1.0  # seconds to write the last records
LOOK_INTERVAL: Final = 5.0  # seconds between two looks at the consumer's thread at most

log = logging.getLogger("notbefore.fleet")


class FleetInstance:
    """Runs until SIGTERM or SIGINT. ``check_arguments``: see ``Supervisor``.

    Raises ``StoreError``, ``ListenError`` or ``ConfigError`` if it cannot start.
    """

    def __init__(
        self,
        config: Config,
        check_arguments: Sequence[str] = (),
        *,
        allow_approval: bool = False,
    ) -> None:
        fleet = config.fleet
        if fleet is None:
            raise ConfigError(
                "the configuration has no section `fleet`, which names the hub to read: add it"
            )
        directory = Path(config.state.dir)
        clock = HubClock()
        self._main = MainThread()
        self._lock = OwnerLock(directory)
        _hold(self._lock, directory)

        # from the outbox to the receivers
        outbox = FleetOutbox(config.routing, self._main.wake, clock.now)
        orders = make_orders(config)
        self._supervisor = Supervisor(
            orders,
            outbox,
            lock=self._lock,  # the courier inherits it
            check_arguments=check_arguments,
        )

        # from the hub to the outbox, and to standard output
        self._stdout = StdoutWriter()
        snapshots, credential = make_snapshots(fleet, directory)
        parts = Parts(
            snapshots=snapshots,
            outbox=outbox,
            clock=clock,
            history=_make_history(fleet, directory),
            write_record=self._stdout.write,
            inventory=_make_inventory(fleet),
            credential=credential,
        )
        self._consumer = Consumer(fleet, parts)
        self._thread = threading.Thread(target=self._consumer.run, name="consumer", daemon=True)

        # to HTTP clients, and to the commands
        self._view = FleetView(config, self._consumer, parts, self._supervisor)
        self._server = HttpServer(config.server, self._view.app)
        provider = _make_provider(fleet)
        approver = FleetApprover(provider, self._consumer, parts, allowed=allow_approval)
        self._control = ControlSocket(directory, FleetDesk(outbox, self._consumer, approver))
        self._systemd = SystemdNotifier()

    def run(self) -> int:
        """Read and notify; return the exit code: 1 if an unforeseen error ended the consumer."""
        with self._main:
            try:
                self._start()
                was_asked = self._supervise()
            finally:
                self._stop()

        code = 0
        if not was_asked:
            code = 1
        if self._thread.is_alive():
            exit_at_once(code)
        return code

    def _start(self) -> None:
        self._server.start()
        log.info(
            "notbefore %s: reading the fleet's changes, serving %s", __version__, self._server.url
        )
        self._stdout.start()
        self._thread.start()
        self._control.start()
        self._systemd.ready()

    def _supervise(self) -> bool:
        """Do the main thread's work until the process should end.

        Return ``True`` after a signal or a new version of the package, and ``False`` if the
        consumer's thread has ended.
        """
        while self._thread.is_alive():
            self._supervisor.tick()
            self._systemd.notify(self._view.status_line(), alive=True)
            if self._supervisor.successor:
                return True
            if self._wait():
                return True
        return False

    def _wait(self) -> bool:
        """Wait for work of the main thread; return whether a signal asks the process to stop."""
        patience = min(self._supervisor.patience, self._systemd.patience, LOOK_INTERVAL)
        return self._main.wait(patience, *self._supervisor.watched)

    def _stop(self) -> None:
        self._systemd.stopping()
        self._control.stop()
        # before the consumer, which still writes what the receivers accept now
        self._supervisor.stop(self._main.wait)
        self._consumer.stop()
        if self._thread.is_alive():
            self._thread.join(HAND_OVER_PATIENCE)
        self._stdout.stop(FLUSH_PATIENCE)
        self._server.stop()
        self._lock.release()


def _hold(lock: OwnerLock, directory: Path) -> None:
    """Take the lock of the state directory.

    Raises ``StoreError`` if another process has it, or if the directory cannot be used.
    """
    try:
        lock.hold()
    except OSError as error:
        raise StoreError(
            f"{directory} cannot be used ({error.strerror or error}): give it to this user, or name"
            " another one with --state-dir"
        ) from None


def _make_history(fleet: FleetConfig, directory: Path) -> History:
    if fleet.history_keep is None:
        return History(directory)
    return History(directory, fleet.history_keep.seconds)


def _make_provider(fleet: FleetConfig) -> MaintenanceProvider | None:
    if not fleet.approval.enabled:
        return None
    return MaintenanceProvider(fleet.approval, fleet.hub)


def _make_inventory(fleet: FleetConfig) -> Inventory | None:
    if fleet.inventory_file is None:
        return None
    return Inventory(Path(fleet.inventory_file))


def make_snapshots(fleet: FleetConfig, directory: Path) -> tuple[Snapshots, Any]:
    """Return the store of the snapshots, and the credential for it and for the hub.

    The credential is ``None`` if the hub has a key.
    """
    credential = make_credential(fleet.hub)
    if fleet.checkpoints is None:
        return FileSnapshots(directory / "partitions"), credential
    # 32 MB, which snapshots in files do not need
    from notbefore.fleet.blob_snapshots import make_blob_snapshots  # noqa: PLC0415

    return make_blob_snapshots(fleet.checkpoints, credential, directory), credential
