"""``FleetOutbox``: notifications go into the outbox and the history; what cannot be read is set aside in a file."""

import base64
import logging
import sqlite3
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Final

from notbefore.core.delivery import Delivery, Routing, SinkThread, deliveries
from notbefore.core.record import Record, json_line
from notbefore.errors import StoreError
from notbefore.fleet.partition import Item, mark_of
from notbefore.fleet.private import private
from notbefore.fleet.reading import Poison
from notbefore.fleet.waves import Notification, known
from notbefore.metrics.totals import Totals
from notbefore.store.schema import Inode, connect, inode_of
from notbefore.store.state import Store
from notbefore.store.state_file import StoredChange, StoredState

MAX_SET_ASIDE: Final = 16 * 1024 * 1024  # bytes of the file, of which there are two
MAX_BODY: Final = 8 * 1024  # bytes of one record that are kept

log = logging.getLogger("notbefore.fleet.outbox")


class FleetOutbox:
    """Of the consumer's thread alone. ``notify`` is called when something is to be sent; it may not wait."""

    def __init__(
        self, store: Store, routing: Routing, write_record: Callable[[bytes], None], notify: Callable[[], None]
    ) -> None:
        self._store = store
        self._routing = routing
        self._write_record = write_record
        self._notify = notify
        self._state = StoredState(totals=store.load().totals)
        self._reading: tuple[sqlite3.Connection, Inode | None] | None = None
        self._version: int | None = None
        self._logged: set[tuple[str, str]] = set()
        self._aside = store.path.with_name("poison.jsonl")

    @property
    def totals(self) -> Totals:
        """What was notified, since this state directory was new."""
        return self._state.totals

    @property
    def routing(self) -> Routing:
        """The routes and sinks."""
        return self._routing

    def commit(self, made: Sequence[Notification], accepted: Collection[str] = ()) -> list[Delivery]:
        """Write notifications with their deliveries in one transaction; returns the deliveries.

        ``accepted``: marks of those that a receiver has accepted before: they are returned, and not sent.
        """
        stored: list[StoredChange] = []
        sent: list[Delivery] = []
        totals = self._state.totals
        for one in made:
            try:
                line, found = self._outgoing(one)
            except Exception:  # nobody foresaw it: it keeps no other notification waiting
                log.exception("a notification cannot be made. Please report it. %r", one)
                continue
            sent += found.values()
            new = tuple(delivery for delivery in found.values() if mark_of(delivery.delivery_id) not in accepted)
            stored.append(StoredChange(one.change, line, new))
            totals = totals.plus(one.change)
        self._state = StoredState(totals=totals)
        self._store.commit(self._state, stored)
        for one_stored in stored:
            self._write_record(one_stored.record + b"\n")
        if sent:
            self._notify()
        return sent

    def _outgoing(self, made: Notification) -> tuple[bytes, dict[str, Delivery]]:
        """The record of a notification, and its deliveries by their ids."""
        line = Record.of(made.change, made.vm, exercise=made.exercise, fleet=made.facts).line()
        vms = map(known, made.routed)
        return line, {one.delivery_id: one for vm in vms for one in deliveries(made.change, line, self._routing, vm)}

    def put(self, sent: Sequence[Delivery]) -> None:
        """Have deliveries sent that a snapshot holds; those that are in the outbox already stay as they are."""
        if sent:
            self._store.put(sent)
            self._notify()

    def threads(self, event_keys: Collection[str]) -> list[SinkThread] | None:
        """What the sinks have said of these events; ``None`` where that cannot be read now."""
        try:
            db = self._connection()
            if db is None:
                return None
            rows = db.execute("SELECT sink, event_key, thread, time FROM threads").fetchall()
        except (sqlite3.Error, StoreError):
            self.close()
            return None
        return [SinkThread(*row) for row in rows if row[1] in event_keys]

    def put_threads(self, threads: Sequence[SinkThread]) -> None:
        """Go on with events that another instance, or an earlier life, has notified of."""
        if threads:
            self._store.put_threads(threads)

    def settled(self, waiting: Collection[str]) -> set[str]:
        """Which of these were accepted, refused or have expired, as far as that can be read and was not read before.

        While the state file cannot be written, what is used instead may lack some: then it is those that were accepted.
        """
        if self._store.degraded is not None:
            with suppress(sqlite3.Error):
                return self._store.unconfirmed() & set(waiting)
            return set()
        pending = self._pending()
        return set(waiting) - pending if pending is not None else set()

    def _pending(self) -> set[str] | None:
        """The ids of the deliveries that wait; ``None``: as at the last call, or it cannot be read."""
        try:
            db = self._connection()
            if db is None:
                return None
            version = db.execute("PRAGMA data_version").fetchone()[0]
            if version == self._version:
                return None
            found = {one for (one,) in db.execute("SELECT delivery_id FROM outbox WHERE state = 'pending'")}
        except (sqlite3.Error, StoreError):
            self.close()
            return None
        self._version = version
        return found

    def _connection(self) -> sqlite3.Connection | None:
        """To the state file, for reading; ``None`` while the outbox may be in another file, or in memory."""
        if self._store.degraded is not None:
            self.close()
            return None
        path = self._store.path
        if self._reading is None or self._reading[1] != inode_of(path):
            self.close()
            self._reading = (connect(path, "ro"), inode_of(path))
        return self._reading[0]

    def confirm(self, ids: Collection[str]) -> None:
        """It is written down that these were accepted: their sinks go on."""
        self._store.confirm(ids)
        self._notify()

    def leave(self, ids: Collection[str] | None) -> None:
        """Do not send these: another instance does, or this one once it has the partition; ``None``: all."""
        self._store.leave_deliveries(ids)

    def close(self) -> None:
        """Let go of the file that ``settled`` reads; the next call opens it again."""
        if self._reading is not None:
            self._reading[0].close()
        self._reading = self._version = None

    def set_aside(self, partition: str, item: Item, poison: Poison) -> None:
        """Append a record that cannot be read to the file, with its place; log the first of each kind."""
        if (partition, poison.reason) not in self._logged:
            self._logged.add((partition, poison.reason))
            log.warning(
                "partition %s, sequence number %d: a record cannot be read (%s: %s): it is in %s, and more are only"
                " counted", partition, item.sequence, poison.reason, poison.detail[:200], self._aside,
            )  # fmt: skip
        row = {
            "partition": partition,
            "sequence": item.sequence,
            "offset": item.offset,
            "reason": poison.reason,
            "detail": poison.detail[:500],
            "bytes": len(item.body),
            "body": base64.b64encode(item.body[:MAX_BODY]).decode(),
        }
        try:
            if self._aside.exists() and self._aside.stat().st_size > MAX_SET_ASIDE:
                self._aside.replace(self._aside.with_suffix(".jsonl.1"))
            with open(self._aside, "ab", opener=private) as file:
                file.write(json_line(row) + b"\n")
        except OSError as error:
            log.warning("%s cannot be written: %s", self._aside, error)
