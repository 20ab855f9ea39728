"""Unforeseen exceptions: each loop of the agent logs them once, counts them, and tries again."""

import json
import logging
import sys
import threading
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest

from notbefore.agent import polling, tracker
from notbefore.agent.thread_guard import MAX_IN_A_ROW, ThreadGuard
from notbefore.config.load import load
from notbefore.core.document import parse
from notbefore.imds.identity import fetch_vm
from notbefore.process.clock import Clock
from notbefore.simulator.server import Simulator
from support.agent import RunningAgent, eventually
from support.azure import ME, body, item
from support.tracking import Tracking, runtime_of

# the installed command, with a parser that has a bug; its second call waits for the file `released`
BROKEN = """
import sys, time
from itertools import count
from pathlib import Path
from notbefore.agent import tracker
from notbefore.commands.main import main

calls = count(1)
released = Path(__file__).with_name("released")

def parse(*_):
    if next(calls) == 2:
        while not released.exists():
            time.sleep(0.05)
    raise RuntimeError("a bug")

tracker.parse = parse
sys.exit(main(sys.argv[3:]))
"""


BUG = RuntimeError("a bug")


def failing(function: Any, times: int) -> Mock:
    """Return a function that fails so many times, and then works as this one."""
    return Mock(wraps=function, side_effect=chain(repeat(BUG, times), repeat(DEFAULT)))


def test_answer_is_processed_at_the_next_poll_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracker, "parse", failing(parse, 3))
    monkeypatch.setattr(polling, "fetch_vm", failing(fetch_vm, 1))
    errors = ThreadGuard()
    agent = Tracking(tmp_path, Clock())

    with Simulator((ME,)) as imds:
        imds.set_document(body(item("E1")))
        config = load(None, {}, {"imds.endpoint": imds.endpoint, "imds.interval": "200ms"})
        watcher = polling.PollThread(runtime_of(config), agent.tracker, agent.clock, errors)
        watcher.start()
        try:
            eventually(lambda: agent.records and agent.snapshot.vm_name == ME)
            eventually(lambda: not watcher.trouble)
        finally:
            watcher.stop()
            agent.close()

    assert [record["azure.scheduled_event.id"] for record in agent.records] == ["E1"]
    assert errors.count == 4
    identity_error, parser_error = (
        record for record in caplog.records if "unforeseen" in record.message
    )
    assert identity_error.exc_info
    assert parser_error.exc_info


def test_agent_ends_with_code_1_when_polling_always_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    broken.write_text(f"#!{sys.executable}{BROKEN}", encoding="utf-8")
    broken.chmod(0o755)
    monkeypatch.setattr(RunningAgent, "python", str(broken))
    monkeypatch.setenv("NOTBEFORE_LOG__FORMAT", "json")
    with (
        Simulator((ME,)) as imds,
        RunningAgent(imds.endpoint, tmp_path / "state").without_waiting() as agent,
    ):
        eventually(lambda: agent.answers("/metrics"))
        eventually(lambda: agent.metric("notbefore_unforeseen_errors_total"))
        (tmp_path / "released").touch()
        exit_code = agent.process.wait(120)
        agent.stop()

    lines = [json.loads(line) for line in agent.log.splitlines()]
    (error,) = (line for line in lines if "unforeseen error in poll" in line["body"])
    assert exit_code == 1
    assert "a bug" in error["exception"]
    assert f"poll failed {MAX_IN_A_ROW} times in a row" in agent.log


def test_vital_work_is_given_up_after_failures_without_a_success() -> None:
    give_up = Mock()
    errors = ThreadGuard(give_up)
    fail = Mock(side_effect=BUG)

    for _ in range(MAX_IN_A_ROW - 1):
        errors.attempt("main", fail)

    assert not errors.given_up

    errors.attempt("main", fail)

    assert errors.given_up
    assert give_up.call_count == 1


def test_success_restarts_the_count_of_failures_in_a_row() -> None:
    errors = ThreadGuard()
    fail = Mock(side_effect=BUG)

    for _ in range(5):
        for _ in range(MAX_IN_A_ROW - 1):
            errors.attempt("main", fail)
        errors.attempt("main", str)

    assert not errors.given_up


def test_work_that_is_not_vital_is_never_given_up() -> None:
    errors = ThreadGuard()
    fail = Mock(side_effect=BUG)

    for _ in range(5 * MAX_IN_A_ROW):
        errors.attempt("http", fail, vital=False)

    assert not errors.given_up


@pytest.mark.parametrize(("name", "ends"), [("stdout", True), ("http-scrape-1", False)])
def test_thread_ended_by_an_exception_is_logged_and_counted(
    name: str, ends: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    errors = ThreadGuard()
    monkeypatch.setattr(threading, "excepthook", errors.thread_ended)
    thread = threading.Thread(target=Mock(side_effect=BUG), name=name)

    thread.start()
    thread.join()

    assert errors.count == 1
    assert errors.given_up == ends
    assert any(record.exc_info for record in caplog.records if record.levelno == logging.ERROR)
