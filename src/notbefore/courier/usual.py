"""The usual interruption of a type of event on this VM, from the history in the state file."""

import logging
import sqlite3
from pathlib import Path

from notbefore.core.record import Record
from notbefore.courier.message import Message, Usual
from notbefore.store.disk import DiskHangsError, DiskThread
from notbefore.store.history import interruptions

log = logging.getLogger("notbefore.courier")


def usual_interruption(state_file: Path, disk: DiskThread, message: Message) -> Usual | None:
    """The median of the measured interruptions; ``None`` where there is none, or where the event is already over.

    Only events that affected this VM count: another VM measures its own. ``disk``: the thread that reads the state
    file; where the disk hangs, the message does not wait for it for longer than its deadline.
    """
    record = message.content
    if not isinstance(record, Record) or record.scope != "self" or record.outcome is not None:
        return None
    from statistics import median  # noqa: PLC0415 - a megabyte that other messages do not need

    try:
        found = disk.do(lambda: interruptions(state_file, record.event_type, record.vm_id or ""))
    except (sqlite3.Error, DiskHangsError) as error:  # the message goes out without it
        log.warning("the history cannot be read (%s): no usual interruption is given", error)
        return None
    return Usual(median(found), len(found)) if found else None
