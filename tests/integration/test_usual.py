"""The usual interruption, from the history in a real state file."""

import logging
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from notbefore.config.messages import Messages
from notbefore.config.secret import Secret
from notbefore.config.sinks import SinkConfig, Slack
from notbefore.core.delivery import Delivery
from notbefore.courier.main import Courier
from notbefore.courier.message import Message, Usual
from notbefore.courier.orders import Orders
from notbefore.courier.redact import Redactor
from notbefore.courier.sinks import make
from notbefore.courier.usual import usual_interruption
from notbefore.store import outbox_intake
from notbefore.store.disk import DiskThread
from notbefore.store.outbox import Outbox
from notbefore.store.schema import transaction
from notbefore.store.state import Store
from notbefore.store.state_file import FILE_NAME
from peers.slack import SlackServer
from support.azure import PEER, STARTED
from support.messages import message, recording

REBOOT = {"EventType": "Reboot", "DurationInSeconds": -1}


def past(seconds: float | None, look: dict[str, object] | None = None, **fields: object) -> bytes:
    """The record of an event that is over, with the interruption that was measured."""
    look = REBOOT if look is None else look
    return recording(message(look, look | STARTED, None), interruption_seconds=seconds, **fields).record.line()


@pytest.fixture
def state_file(tmp_path: Path) -> Path:
    Store(tmp_path).close()
    return tmp_path / FILE_NAME


def write(state_file: Path, *records: bytes) -> None:
    with closing(sqlite3.connect(state_file)) as db, db:
        db.executemany("INSERT INTO history (change_id, time, record) VALUES ('x', 0, ?)", [(one,) for one in records])


def usual(path: Path, content: Message) -> Usual | None:
    disk = DiskThread()
    found = usual_interruption(path, disk, content)
    disk.end()
    return found


def test_it_is_the_median_of_this_type_on_this_vm(state_file: Path) -> None:
    write(state_file, *map(past, (90.0, 30.0, 100.0)))
    assert usual(state_file, message(REBOOT)) == Usual(90.0, 3)
    assert usual(state_file, message()) is None  # a Freeze


def test_what_is_not_this_vm_s_or_was_not_measured_does_not_count(state_file: Path) -> None:
    write(
        state_file,
        past(None),
        past(70.0, scope="peer"),
        past(80.0, vm_id="another"),
        past(60.0, change="started"),
        b"not JSON",
        b"\xff\xfe",
        past(50.0),
    )
    assert usual(state_file, message(REBOOT)) == Usual(50.0, 1)


def test_it_is_not_asked_for_where_it_says_nothing(state_file: Path) -> None:
    write(state_file, past(90.0))
    assert usual(state_file, message(REBOOT, REBOOT | STARTED)) == Usual(90.0, 1)
    assert usual(state_file, message(REBOOT, REBOOT | STARTED, None)) is None
    assert usual(state_file, message(REBOOT | {"Resources": [PEER]})) is None


def test_a_history_that_cannot_be_read_holds_up_no_message(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    assert usual(tmp_path / "none", message(REBOOT)) is None
    assert "the history cannot be read" in caplog.text


def test_a_disk_that_hangs_holds_up_no_message(state_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(state_file, past(90.0))
    disk, answers = DiskThread(0.05), threading.Event()
    disk.post(answers.wait)
    assert usual_interruption(state_file, disk, message(REBOOT)) is None
    assert "the disk has not answered" in caplog.text
    answers.set()
    disk.end()


def test_the_courier_gives_it_to_the_sink(state_file: Path) -> None:
    write(state_file, past(90.0), past(100.0))
    one = message(REBOOT)
    now = time.time()
    row = Delivery("d", one.event_key, "chat", "announced", "critical", now, now, now + 1e6, True, one.line)
    with SlackServer() as slack, closing(Outbox(state_file)) as outbox:
        with transaction(outbox._db) as db:
            outbox_intake.put(db, [row])
        config = SinkConfig(slack=Slack(url=Secret(slack.url)))
        orders = Orders(str(state_file), {"chat": config}, linger=0.0)
        with closing(Courier(outbox, orders, lambda name: make(name, config, Messages()), Redactor([]))) as courier:
            courier.run()
        (request,) = slack.requests
    assert "Usual interruption of WestNO_0*\\n95 s (median of 2 events)" in request.body.decode()
