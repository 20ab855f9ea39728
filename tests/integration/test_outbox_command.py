"""``notbefore outbox``, on the outbox of an agent that ended and of one that runs."""

import json
import os
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import Mock

import pytest

from notbefore.agent.desk import AgentDesk, answer
from notbefore.commands import owner
from notbefore.commands.owner import ask_owner
from notbefore.core.clock import Instant
from notbefore.core.delivery import Delivery
from notbefore.core.outbox import SendResult
from notbefore.core.tracked import Tracked, TrackedEvent
from notbefore.errors import NotBeforeError, StoreError
from notbefore.process.clock import Clock
from notbefore.process.control_socket import ControlSocket, listens
from notbefore.process.operations import OutboxReply, OutboxRequest
from notbefore.store.file import FILE_NAME, StoredState
from notbefore.store.lock import OwnerLock
from notbefore.store.store import Store
from support.agent import eventually, notbefore
from support.azure import T0, event
from support.box import delivery, rows_of
from support.needs import ordinary_user


def dead(name: str, **fields: Any) -> Delivery:
    """Return a delivery to the sink ``hook`` whose id repeats this letter."""
    now = time.time()
    values = {"delivery_id": name * 32, "created": now, "due": now, "expires": now + 100, **fields}
    return delivery(name, "hook", **values)


def write_state(directory: Path, *refused: Delivery, listed: tuple[str, ...] = ()) -> str:
    """Write a state with dead letters, some of events that are listed; return the directory."""
    events = {
        key: TrackedEvent(event(EventId=key), "self", Instant(T0), beginning_seen=True)
        for key in listed
    }
    results = [SendResult(letter.delivery_id, "refused", "404") for letter in refused]
    with closing(Store(directory, Clock())) as store:
        store.commit(StoredState(tracked=Tracked(events=events)))
        store.put(refused)
        assert store.disk.wait_written(20)
        store.exchange([], {"hook": 100})
        store.exchange(results, {})
    return str(directory)


def rows(directory: str) -> dict[str, Delivery]:
    """Return the deliveries in a state directory, by the first letter of their ids."""
    with closing(Store(Path(directory), Clock())) as store:
        return {row.delivery_id[0]: row for row in rows_of(store)}


def outbox(*words: str) -> str:
    """Run an outbox command that must succeed; return its output."""
    result = notbefore("outbox", *words)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_outbox_show_prints_the_error_of_a_dead_letter(tmp_path: Path) -> None:
    state = write_state(tmp_path, dead("a"))

    output = outbox("show", "--state-dir", state, "a")

    assert json.loads(output)["error"] == "404"


def test_outbox_retry_waits_for_the_agent(tmp_path: Path) -> None:
    state = write_state(tmp_path, dead("a"))

    output = outbox("retry", "--state-dir", state, "a")

    assert output == "1 will be sent again when the agent runs.\n"


def test_outbox_drop_removes_each_delivery_once(tmp_path: Path) -> None:
    state = write_state(tmp_path, dead("a"), dead("b"))

    output = outbox("drop", "--state-dir", state, "a", "aa", "b")

    assert output == "2 dropped.\n"
    assert outbox("list", "--state-dir", state) == "The outbox is empty.\n"


@pytest.mark.parametrize(
    ("words", "mistake"),
    [
        pytest.param((), "ACTION", id="no action"),
        pytest.param(
            ("retry", "a", "--all"), "expected ids (see `outbox list`), or --all", id="ids and all"
        ),
        pytest.param(("show",), "required: ID", id="no id"),
        pytest.param(
            ("list", "--user", "reader"), "outbox list: --user needs --url", id="user without url"
        ),
        pytest.param(
            ("list", "--url", "http://127.0.0.1:1", "--socket", "control.sock"),
            "--url and --socket both name the agent",
            id="two agents",
        ),
    ],
)
def test_outbox_names_the_mistake_in_its_arguments(
    tmp_path: Path, words: tuple[str, ...], mistake: str
) -> None:
    result = notbefore("outbox", *words, NOTBEFORE_STATE__DIR=write_state(tmp_path))

    assert result.returncode == 2
    assert mistake in result.stderr


@pytest.fixture
def state_with_ended_events(tmp_path: Path) -> str:
    """A state with four dead letters, of which only the event of b is still listed."""
    return write_state(
        tmp_path,
        dead("a"),
        dead("b"),
        dead("c", kind="finished", expires_with_event=False),
        dead("d", kind="started", expires_with_event=False),
        listed=("b",),
    )


def test_retry_all_leaves_out_announcements_of_ended_events(state_with_ended_events: str) -> None:
    output = outbox("retry", "--all", "--state-dir", state_with_ended_events)

    states = {name: row.state for name, row in rows(state_with_ended_events).items()}
    assert output.startswith(
        "2 left out: their events are over. To send one anyway, give its ID.\n"
    )
    assert states == {"a": "dead", "b": "pending", "c": "pending", "d": "dead"}


def test_retry_of_an_ended_event_by_its_id_has_a_day(state_with_ended_events: str) -> None:
    output = outbox("retry", "a", "d", "--state-dir", state_with_ended_events)

    seconds_left = rows(state_with_ended_events)["a"].expires - Clock().boot_time()
    assert output.startswith("2 will be sent again")
    assert 86_400 - 600 < seconds_left <= 86_400


def test_drop_all_finds_no_dead_letter_after_a_retry(tmp_path: Path) -> None:
    state = write_state(tmp_path, dead("a"))
    outbox("retry", "a", "--state-dir", state)

    output = outbox("drop", "--all", "--state-dir", state)

    assert output.startswith("No dead letters were found.")


def test_outbox_command_changes_nothing_when_it_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_state(tmp_path, dead("a"))
    with closing(sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)) as other:

        def lock_and_answer(*arguments: Any) -> Any:
            other.execute("BEGIN EXCLUSIVE")
            return answer(*arguments)

        monkeypatch.setattr(owner, "answer", lock_and_answer)

        with pytest.raises(
            StoreError, match=r"cannot be written \(database is locked\): nothing was changed"
        ):
            ask_owner(tmp_path, OutboxRequest("drop", ("a",)), OutboxReply)


# ---- the outbox of an agent that runs


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """The store of an agent that answers commands."""
    with closing(Store(tmp_path, Clock())) as store:
        control = ControlSocket(tmp_path, AgentDesk(Mock(spec_set=()), store))
        control.start()
        eventually(lambda: listens(tmp_path))
        yield store
        control.stop()


def test_outbox_list_names_the_delivery_before(store: Store, tmp_path: Path) -> None:
    store.put([dead("a"), dead("a", delivery_id="b" * 32)])

    output = outbox("list", "--state-dir", str(tmp_path))

    _, _, second, *_ = output.splitlines()
    assert " after aaaaaaaa" in re.sub(" +", " ", second)


def test_deliveries_that_are_being_sent_are_left(store: Store, tmp_path: Path) -> None:
    store.put([dead("a")])
    eventually(lambda: store.exchange([], {"hook": 1}))

    retried = outbox("retry", "a", "--state-dir", str(tmp_path))
    dropped = outbox("drop", "a", "--state-dir", str(tmp_path))

    reason = "1 left as they are: they are being sent"
    assert retried.endswith(f"again now, {reason}.\n")
    assert dropped == f"0 dropped, {reason}.\n"


def test_delivery_is_dropped_once_its_courier_ended(store: Store, tmp_path: Path) -> None:
    store.put([dead("a")])
    eventually(lambda: store.exchange([], {"hook": 1}))

    store.courier_ended()
    output = outbox("drop", "a", "--state-dir", str(tmp_path))

    assert output == "1 dropped.\n"


@pytest.mark.usefixtures("store")
def test_unknown_delivery_id_is_refused(tmp_path: Path) -> None:
    result = notbefore("outbox", "drop", "c", "--state-dir", str(tmp_path))

    assert "No delivery id starts with 'c'." in result.stderr


# ---- directories and permissions


def test_missing_state_directory_is_explained(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"has `notbefore run` been started here\? --state-dir"):
        ask_owner(tmp_path / "nowhere", OutboxRequest("show"), OutboxReply)


has_posix_permissions = pytest.mark.skipif(
    not hasattr(os, "geteuid"), reason="there are other permissions on Windows"
)


@has_posix_permissions
def test_missing_permission_to_ask_the_agent_is_explained(tmp_path: Path) -> None:
    state = tmp_path / "state"
    write_state(state, dead("a"))
    if os.geteuid() != 0:  # then the test runs as an ordinary user itself
        state.chmod(0)

    with (
        ordinary_user(),
        pytest.raises(NotBeforeError, match="only root and the agent's own user may ask this"),
    ):
        ask_owner(state, OutboxRequest("show"), OutboxReply)

    state.chmod(0o700)


@has_posix_permissions
def test_missing_permission_to_create_the_directory_is_explained() -> None:
    with TemporaryDirectory() as directory:
        Path(directory).chmod(0o555)

        with (
            ordinary_user(),
            pytest.raises(StoreError, match=r"no permission for .*/state: use another directory"),
        ):
            OwnerLock(Path(directory, "state")).hold()
