"""``notbefore outbox`` on an outbox that was left behind."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from notbefore.core.delivery import Delivery, DeliveryResult
from notbefore.errors import StoreError
from notbefore.store import outbox_intake
from notbefore.store.lock import CourierLock
from notbefore.store.outbox import DEAD_SECONDS, CourierTurn, Outbox
from notbefore.store.schema import transaction
from notbefore.store.state import Store
from notbefore.store.state_file import FILE_NAME
from support.agent import notbefore

NOBODY = 65534
WEEK = 7 * 86_400.0


def dead(name: str, **fields: Any) -> Delivery:
    now = time.time()
    return Delivery(
        **{
            "delivery_id": name * 32,
            "event_key": name,
            "sink": "hook",
            "kind": "announced",
            "severity": "info",
            "created": now,
            "due": now,
            "expires": now + 100,
            "expires_with_event": True,
            "record": b"{}",
            **fields,
        }
    )


@contextmanager
def outbox_in(directory: Path) -> Iterator[Outbox]:
    with closing(Outbox(directory / FILE_NAME)) as found:
        yield found


def left(directory: Path, *refused: Delivery, listed: tuple[str, ...] = ()) -> Path:
    """A state directory with dead letters, of which some belong to events that are still listed."""
    Store(directory).close()
    with outbox_in(directory) as outbox:
        with transaction(outbox._db) as db:
            outbox_intake.put(db, refused)
            db.executemany("INSERT INTO tracked VALUES (?, 1, '{}')", [(key,) for key in listed])
        now = time.time()
        outbox.exchange(CourierTurn([], {one.sink: 100 for one in refused}, now))
        results = [DeliveryResult(one.delivery_id, "dead", now, error="404") for one in refused]
        outbox.exchange(CourierTurn(results, {}, now))
    return directory


def rows(directory: Path) -> dict[str, Delivery]:
    with outbox_in(directory) as outbox:
        return {one.delivery_id[0]: one for one in outbox.rows()}


def done(*words: str) -> str:
    run = notbefore("outbox", *words)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_options_may_stand_before_the_ids(tmp_path: Path) -> None:
    state = str(left(tmp_path, dead("a"), dead("b")))
    assert json.loads(done("show", "--state-dir", state, "--json", "a"))["error"] == "404"
    assert json.loads(done("show", "a", "--state-dir", state))["error"] == "404"
    assert done("retry", "--state-dir", state, "a").startswith("1 will be sent again now")
    assert done("drop", "--state-dir", state, "a", "b") == "2 dropped.\n"
    assert done("list", "--state-dir", state) == "The outbox is empty.\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [((), "ACTION"), (("retry",), "expected ids (see `notbefore outbox list`), or --all"), (("show",), "expected ids")],
)
def test_what_is_missing_is_said(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    run = notbefore("outbox", *words, NOTBEFORE_STATE__DIR=str(left(tmp_path)))
    assert (run.returncode, said in run.stderr) == (2, True)


def test_all_leaves_out_what_would_announce_an_event_that_is_over(tmp_path: Path) -> None:
    state = left(tmp_path, dead("a"), dead("b"), dead("c", kind="finished", expires_with_event=False), listed=("b",))
    said = done("retry", "--all", "--state-dir", str(state))
    assert said.splitlines()[0] == "1 left out: their events are over. To send one all the same, give its ID."
    assert said.splitlines()[1].startswith("2 will be sent again now")
    assert {name: one.state for name, one in rows(state).items()} == {"a": "dead", "b": "pending", "c": "pending"}
    assert done("retry", "a", "--state-dir", str(state)).startswith("1 will be sent again now")


@pytest.mark.parametrize(("configured", "days"), [(True, 7), (False, DEAD_SECONDS / 86_400)])
def test_what_is_sent_again_has_the_time_that_its_sink_gives_it(
    tmp_path: Path, *, configured: bool, days: float
) -> None:
    state = left(tmp_path / "state", dead("a"))
    config = tmp_path / "notbefore.yaml"
    config.write_text("sinks: {hook: {webhook: {url: 'https://example.org', expire_after: 7d}}}", encoding="utf-8")
    done("retry", "a", "--state-dir", str(state), *(["--config", str(config)] if configured else []))
    assert 0 <= time.time() + days * 86_400 - rows(state)["a"].expires < 600


def test_what_is_on_its_way_is_left_and_why_is_said(tmp_path: Path) -> None:
    Store(tmp_path).close()
    with outbox_in(tmp_path) as outbox:
        with transaction(outbox._db) as db:
            outbox_intake.put(db, [dead("a")])
        outbox.exchange(CourierTurn([], {"hook": 1}, time.time()))
    with CourierLock(tmp_path) as lock:
        lock.acquire(1, lambda: None)
        left = "1 left as they are: they are being sent"
        assert done("retry", "a", "--state-dir", str(tmp_path)).endswith(f"is running, {left}.\n")
        assert done("drop", "a", "--state-dir", str(tmp_path)) == f"0 dropped, {left}.\n"
    assert done("drop", "a", "--state-dir", str(tmp_path)) == "1 dropped.\n"  # that courier has ended


def test_a_sign_of_life_that_was_refused_is_not_kept(tmp_path: Path) -> None:
    late = time.time() + WEEK
    state = left(
        tmp_path, dead("a", kind="heartbeat", expires_with_event=False), dead("b", kind="heartbeat", expires=late)
    )
    with outbox_in(state) as outbox:
        outbox.retry([one.delivery_id for one in outbox.rows()], time.time(), None)
        assert outbox.rows()[1].expires == late
        with transaction(outbox._db) as db:
            outbox_intake.expire(db, time.time() + 200)
        assert [one.delivery_id[0] for one in outbox.rows()] == ["b"]


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="there are other permissions on Windows")
def test_an_outbox_of_somebody_else_s_says_so(tmp_path: Path) -> None:
    state = left(tmp_path / "state", dead("a"))
    state.chmod(0o700 if os.geteuid() == 0 else 0)
    try:
        if os.geteuid() == 0:
            os.seteuid(NOBODY)
        with pytest.raises(StoreError, match="not readable by you: run this as root or as the agent's user"):
            Outbox(state / FILE_NAME)
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
        state.chmod(0o700)
