"""``notbefore outbox`` on an outbox that was left behind, and of an agent that runs."""

import json
import os
import sqlite3
import time
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
    now = time.time()
    of = {"delivery_id": name * 32, "created": now, "due": now, "expires": now + 100, **fields}
    return delivery(name, "hook", **of)


def left(directory: Path, *refused: Delivery, listed: tuple[str, ...] = ()) -> Path:
    """A state directory with dead letters, of which some belong to events that are still listed."""
    events = {
        key: TrackedEvent(event(EventId=key), "self", Instant(T0), beginning_seen=True)
        for key in listed
    }
    with closing(Store(directory, Clock())) as store:
        store.commit(StoredState(tracked=Tracked(events=events)))
        store.put(refused)
        assert store.disk.wait_written(20)
        store.exchange([], {one.sink: 100 for one in refused})
        store.exchange([SendResult(one.delivery_id, "refused", "404") for one in refused], {})
    return directory


def rows(directory: Path) -> dict[str, Delivery]:
    with closing(Store(directory, Clock())) as store:
        return {row.delivery_id[0]: row for row in rows_of(store)}


def done(*words: str) -> str:
    run = notbefore("outbox", *words)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_outbox_options_may_precede_the_ids(tmp_path: Path) -> None:
    state = str(left(tmp_path, dead("a"), dead("b")))

    assert json.loads(done("show", "--state-dir", state, "a"))["error"] == "404"
    assert done("retry", "--state-dir", state, "a") == "1 will be sent again when the agent runs.\n"
    assert done("drop", "--state-dir", state, "a", "aa", "b") == "2 dropped.\n"
    assert done("list", "--state-dir", state) == "The outbox is empty.\n"


@pytest.mark.parametrize(
    ("words", "mistake"),
    [
        ((), "ACTION"),
        (("retry", "a", "--all"), "expected ids (see `outbox list`), or --all"),
        (("show",), "required: ID"),
        (("list", "--user", "reader"), "outbox list: --user needs --url"),
        (
            ("list", "--url", "http://127.0.0.1:1", "--socket", "control.sock"),
            "--url and --socket both name the agent",
        ),
    ],
)
def test_outbox_names_the_missing_argument(
    tmp_path: Path, words: tuple[str, ...], mistake: str
) -> None:
    run = notbefore("outbox", *words, NOTBEFORE_STATE__DIR=str(left(tmp_path)))

    assert run.returncode == 2
    assert mistake in run.stderr


def test_retry_all_leaves_out_announcements_of_ended_events(tmp_path: Path) -> None:
    lasting = [
        dead(name, kind=kind, expires_with_event=False)
        for name, kind in (("c", "finished"), ("d", "started"))
    ]
    state = left(tmp_path, dead("a"), dead("b"), *lasting, listed=("b",))

    lines = done("retry", "--all", "--state-dir", str(state)).splitlines()

    assert lines[0] == "2 left out: their events are over. To send one anyway, give its ID."
    assert "".join(one.state[0] for _, one in sorted(rows(state).items())) == "dppd"
    assert done("retry", "a", "d", "--state-dir", str(state)).startswith("2 will be sent again")
    assert done("drop", "--all", "--state-dir", str(state)).startswith(
        "No dead letters were found."
    )
    assert 0 <= Clock().boot_time() + 86_400 - rows(state)["a"].expires < 600, "it has a day"


def test_outbox_command_changes_nothing_when_it_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = left(tmp_path, dead("a"))
    with closing(sqlite3.connect(state / FILE_NAME, isolation_level=None)) as other:
        monkeypatch.setattr(
            owner, "answer", lambda *of: [other.execute("BEGIN EXCLUSIVE"), answer(*of)][1]
        )

        with pytest.raises(
            StoreError, match=r"cannot be written \(database is locked\): nothing was changed"
        ):
            ask_owner(state, OutboxRequest("drop", ("a",)), OutboxReply)


def test_deliveries_being_sent_are_left_and_the_reason_is_printed(tmp_path: Path) -> None:
    with closing(Store(tmp_path, Clock())) as store:
        desk = AgentDesk(Mock(spec_set=()), store)  # nothing is approved
        control = ControlSocket(tmp_path, desk)
        control.start()

        eventually(lambda: listens(tmp_path))

        store.put([dead("a"), dead("a", delivery_id="b" * 32)])
        assert done("list", "--state-dir", str(tmp_path)).splitlines()[2].split()[6:8] == [
            "after",
            "aaaaaaaa",
        ]
        eventually(lambda: store.exchange([], {"hook": 1}))

        being_sent = "1 left as they are: they are being sent"
        assert done("retry", "a", "--state-dir", str(tmp_path)).endswith(
            f"again now, {being_sent}.\n"
        )
        assert done("drop", "a", "--state-dir", str(tmp_path)) == f"0 dropped, {being_sent}.\n"

        refused = notbefore("outbox", "drop", "c", "--state-dir", str(tmp_path))
        assert "No delivery id starts with 'c'." in refused.stderr

        store.courier_ended()
        assert done("drop", "a", "--state-dir", str(tmp_path)) == "1 dropped.\n"

        control.stop()


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="there are other permissions on Windows")
def test_missing_permission_for_the_state_directory_is_explained(tmp_path: Path) -> None:
    state = left(tmp_path / "state", dead("a"))
    with pytest.raises(StoreError, match=r"has `notbefore run` been started here\? --state-dir"):
        ask_owner(state / "nowhere", OutboxRequest("show"), OutboxReply)

    state.chmod(0o700 if os.geteuid() == 0 else 0)
    with (
        ordinary_user(),
        pytest.raises(NotBeforeError, match="only root and the agent's own user may ask this"),
    ):
        ask_owner(state, OutboxRequest("show"), OutboxReply)

    state.chmod(0o700)
    with TemporaryDirectory() as place:  # which others may search
        Path(place).chmod(0o555)

        with (
            ordinary_user(),
            pytest.raises(StoreError, match=r"no permission for .*/state: use another directory"),
        ):
            OwnerLock(Path(place, "state")).hold()
