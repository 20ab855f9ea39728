"""The usual interruption: remembered by the store, given with a delivery, and shown in the text of its message."""

import time
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from notbefore.core.delivery import Delivery
from notbefore.core.lifecycle import diff
from notbefore.core.outbox import GivenDelivery, SendResult
from notbefore.core.record import Record
from notbefore.core.tracked import Tracked
from notbefore.courier.message import Message
from notbefore.process.clock import Clock
from notbefore.store.store import Store, StoredChange
from support.agent import eventually
from support.azure import PEER, STARTED, document, item, now
from support.messages import VM, message

REBOOT = {"EventType": "Reboot", "DurationInSeconds": -1}
NUMBERS = count()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(Store(tmp_path, Clock())) as found:
        yield found


def remember(store: Store, seconds: float | None, look: dict[str, object] | None = None, **fields: object) -> None:
    """An event of this type is over, and this was measured."""
    event: dict[str, Any] = (REBOOT if look is None else look) | {"EventId": f"PAST-{next(NUMBERS)}"}
    tracked = diff(Tracked(), document(item(**event | STARTED)), now(0)).tracked
    (change,) = diff(tracked, document(), now(60)).changes
    record = replace(Record.of(change, VM), interruption_seconds=seconds, **fields)
    store.commit(store.load(), [StoredChange(change, record.line())])


def given(store: Store, one: Message) -> GivenDelivery:
    """What a courier is given of a message."""
    wall = time.time()
    row = Delivery(f"{next(NUMBERS)}", one.event_key, "chat", one.kind, "info", wall, wall, wall + 60, True, one.line)
    store.put([row])
    (found,) = eventually(lambda: store.exchange([], {"chat": 1}))
    store.exchange([SendResult(found.delivery_id, "accepted")], {})
    return found


def test_it_is_the_median_of_this_type_on_this_vm(store: Store) -> None:
    for seconds in (90.0, 30.0, 100.0):
        remember(store, seconds)
    assert given(store, message(REBOOT)).usual == (90.0, 3)
    assert given(store, message()).usual is None  # a Freeze


def test_what_is_not_this_vm_s_or_was_not_measured_does_not_count(store: Store) -> None:
    remember(store, None)
    remember(store, 70.0, scope="peer")
    remember(store, 80.0, vm_id="another")
    remember(store, 50.0)
    assert given(store, message(REBOOT)).usual == (50.0, 1)


def test_it_is_not_given_where_it_says_nothing(store: Store) -> None:
    remember(store, 90.0)
    assert given(store, message(REBOOT, REBOOT | STARTED)).usual == (90.0, 1)
    assert given(store, message(REBOOT, REBOOT | STARTED, None)).usual is None
    assert given(store, message(REBOOT | {"Resources": [PEER]})).usual is None


def test_it_is_known_after_a_restart(tmp_path: Path) -> None:
    with closing(Store(tmp_path, Clock())) as store:
        remember(store, 90.0)
    with closing(Store(tmp_path, Clock())) as store:
        eventually(lambda: given(store, message(REBOOT)).usual == (90.0, 1))
