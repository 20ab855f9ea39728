"""The commands as a user types them, and their exit codes."""

import importlib
import os
import re
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import trustme

from notbefore.commands.demo import NEXT
from notbefore.commands.main import main
from notbefore.fleet.history import PastEvent
from notbefore.simulator.server import Simulator
from notbefore.store.file import FILE_NAME
from support.agent import PATIENCE, RunningAgent, eventually, free_port, notbefore, run
from support.azure import FUTURE, ID, body, item
from support.json_output import parsed_output
from support.past_events import past_event
from support.peers import Answer, HttpPeer
from support.state_file import read_records

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    state = tmp_path_factory.mktemp("state")
    with Simulator() as imds:
        event = item(NotBefore=FUTURE, Resources=["WestNO_0", "\u017eaba"])
        imds.set_document(body(event, incarnation=2))
        # three late polls are a silence: with this interval not even a busy machine causes one
        with RunningAgent(imds.endpoint, state, interval="10s") as running:
            running.wait_for_changes("announced")
            yield running


def url(agent: RunningAgent) -> str:
    return f"http://127.0.0.1:{agent.port}"


RunCommand = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run_command(capsys: pytest.CaptureFixture[str], log_as_before: None) -> RunCommand:  # noqa: ARG001 - `check-config` sets up the log
    """Run a command in this process; return its exit code, its output and its errors."""

    def run(*words: str) -> tuple[int, str, str]:
        try:
            code = main(list(words))
        except SystemExit as end:
            code = int(str(end.code))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_notbefore_without_a_command_lists_commands_and_exit_codes(run_command: RunCommand) -> None:
    code, out, _ = run_command()

    assert code == 2
    assert "simulate" in out
    assert "Exit codes" in out


def test_events_prints_a_table_with_the_id_in_sixty_columns(
    agent: RunningAgent, run_command: RunCommand
) -> None:
    code, table, _ = run_command("events", "--url", url(agent))

    assert code == 0
    assert "2058-03-01T12:00:00Z" in table
    _, row = table.splitlines()
    assert ID in row[:60], "`watch` in a narrow terminal shows the whole id"


def test_events_prints_json_objects(agent: RunningAgent, run_command: RunCommand) -> None:
    _, output, _ = run_command("events", "--json", "--url", url(agent))

    (event,) = parsed_output("events", output)
    assert event["event_id"] == ID
    assert event["scope"] == "self"


def test_events_names_options_that_do_not_fit_the_agent(
    agent: RunningAgent, run_command: RunCommand
) -> None:
    _, _, of_fleet = run_command("events", "--fleet", "--url", url(agent))
    _, _, of_authority = run_command("events", "--ca-file", "none", "--url", url(agent))

    assert "is this an agent, not a fleet instance?" in of_fleet
    assert "need https://" in of_authority


def test_health_asks_the_configured_address(
    agent: RunningAgent, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTBEFORE_SERVER__LISTEN", f"0.0.0.0:{agent.port}")
    assert run_command("health") == (0, "ok\n", "")

    monkeypatch.setenv("NOTBEFORE_SERVER__LISTEN", f"127.0.0.1:{free_port()}")
    code, _, error = run_command("health")

    assert code == 1
    assert "is `notbefore run` running" in error
    assert "no agent answers at http://127.0.0.1:" in error


def test_history_shows_the_changes_as_a_table_and_as_json(
    agent: RunningAgent, run_command: RunCommand
) -> None:
    _, table, _ = run_command("history", "--url", url(agent), "--since", "1h")
    _, output, _ = run_command("history", "--json", "--url", url(agent))

    assert "announced" in table
    (change,) = parsed_output("history", output)
    assert change["azure.scheduled_event.change"] == "announced"


@pytest.mark.parametrize("since", ["2058-01-01T00:00:00+01:00", "1ms"])
def test_history_shows_nothing_when_all_changes_are_older(
    agent: RunningAgent, run_command: RunCommand, since: str
) -> None:
    _, table, _ = run_command("history", "--url", url(agent), "--since", since)

    assert table == "No change has been seen.\n"


def test_history_fails_when_the_agent_cannot_read_its_file(
    agent: RunningAgent, run_command: RunCommand
) -> None:
    with sqlite3.connect(agent.state / FILE_NAME, isolation_level=None, timeout=60) as file:
        file.execute("BEGIN EXCLUSIVE")

        code, out, error = run_command("history", "--json", "--url", url(agent))

    assert code == 1
    assert out == ""
    assert "changes are missing here: the agent cannot read its state file now" in error


def test_history_leaves_a_locked_state_file_as_it_is(
    imds: Simulator, tmp_path: Path, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    imds.set_document(body(item()))
    with RunningAgent(imds.endpoint, tmp_path):
        eventually(lambda: read_records(tmp_path))
    monkeypatch.setattr("notbefore.store.file.OPENING_SECONDS", 0.1)

    with sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None, timeout=60) as file:
        file.execute("BEGIN EXCLUSIVE")
        code, out, error = run_command("history", "--json", "--state-dir", str(tmp_path))

    assert code == 3
    assert out == ""
    assert "cannot be opened (database is locked)" in error
    assert "set aside" not in error
    assert len(read_records(tmp_path)) == 1


# the stack of a thread needs all memory of the process
WITHOUT_MEMORY = """
import resource, sys, threading
from notbefore.commands.main import main
threading.stack_size(1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
raise SystemExit(main(['run', '--listen', '127.0.0.1:0', '--state-dir', sys.argv[1]]))
"""


def test_run_names_the_memory_that_its_threads_lack(tmp_path: Path) -> None:
    done = run(sys.executable, "-c", WITHOUT_MEMORY, tmp_path)

    assert done.returncode == 3
    assert "the system refuses more memory or threads (can't start new thread)" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError(), "no memory"),
        (
            ImportError("libssl.so.3: failed to map segment from shared object"),
            "libssl.so.3: failed to map segment from shared object",
        ),
    ],
)
def test_run_names_the_memory_that_its_modules_lack(
    error: Exception, reason: str, run_command: RunCommand
) -> None:
    with mock.patch.object(importlib, "import_module", side_effect=error):
        code, _, stderr = run_command("run")

    assert code == 3
    assert f"the system refuses more memory or threads ({reason})" in stderr


def test_history_reads_the_state_of_an_agent_that_has_stopped(
    imds: Simulator, tmp_path: Path, run_command: RunCommand
) -> None:
    imds.set_document(body(item()))
    with RunningAgent(imds.endpoint, tmp_path):
        # the end of an agent does not wait for a slow disk
        eventually(lambda: read_records(tmp_path))

    code, out, _ = run_command("history", "--state-dir", str(tmp_path))

    assert code == 0
    assert out.count(ID) == 1


def test_report_asks_each_address_of_a_name(
    tmp_path: Path, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = trustme.CA()
    authority_file = str(tmp_path / "ca")
    authority.cert_pem.write_to_path(authority_file)
    addresses = {
        "fleet.test": ("127.0.0.1", "127.0.0.2"),
        "other.test": ("127.0.0.1",),
        "localhost": ("::1", "127.0.0.1"),
    }
    resolve = socket.getaddrinfo

    def resolve_by_table(host: str, *words: Any, **options: Any) -> list[Any]:
        answers: list[Any] = []
        for address in addresses.get(host, (host,)):
            answers += resolve(address, *words, **options)
        return answers

    def error_of_report(name: str, port: int) -> str:
        url = f"https://{name}:{port}"
        _, _, error = run_command("fleet", "report", "--url", url, "--ca-file", authority_file)
        return error

    monkeypatch.setattr(socket, "getaddrinfo", resolve_by_table)
    with HttpPeer(authority, "fleet.test", "localhost") as peer:
        peer.answers += [Answer(body=b'{"events": []}'), Answer(body=b"{}")]
        refused = error_of_report("fleet.test", peer.port)
        untrusted = error_of_report("other.test", peer.port)
        incomplete = error_of_report("localhost", peer.port)

    assert "answers at https://127.0.0.2:" in refused
    assert "TLS failed" in untrusted
    assert re.search(r"//localhost:.* has no list `events`", incomplete)


def test_report_in_csv_has_fixed_columns_and_no_formulas(run_command: RunCommand) -> None:
    with HttpPeer() as peer:

        def report_of(events: list[PastEvent]) -> list[str]:
            peer.answers.append(Answer(body=msgspec.json.encode({"events": events})))
            _, output, _ = run_command("fleet", "report", "--csv", "--url", peer.url)
            return output.splitlines()

        without_events = report_of([])
        head, row = report_of([past_event(region="=1+1")])

    assert without_events == [head]
    assert row.startswith("Reboot,'=1+1,1,1")


MUTE = ("fleet", "mute", "fleet.yml")


@pytest.fixture
def wrong_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "getuid", lambda: 54321)  # in a container the user has no name
    monkeypatch.setattr(os, "environ", {})
    (tmp_path / "fleet.yml").write_text("fleet: {}", encoding="utf-8")
    (tmp_path / "often.yml").write_text("imds:\n  interval: often\n", encoding="utf-8")


@pytest.mark.usefixtures("wrong_files")
@pytest.mark.parametrize(
    ("words", "code", "mistake"),
    [
        (("event",), 2, "there is no command 'event': did you mean 'events'?"),
        (
            ("check-config", "--conect"),
            2,
            "notbefore check-config: error: unrecognized arguments: --conect",
        ),
        (("history", "--state-dir", "empty"), 3, "has `notbefore run` been started here?"),
        (
            ("history", "--state-dir", "empty", "--since", "soon"),
            2,
            "--since: expected an age (30m, 1h, 2d) or a time",
        ),
        (
            ("history", "--since", "0001-01-01T00:00:00+14:00"),
            2,
            "--since: expected an age (30m, 1h, 2d) or a time",
        ),
        (("check-config", "."), 2, ". cannot be read: Is a directory"),
        (("approve", "ID", "--state-dir", "empty"), 1, "no agent listens at empty/control.sock"),
        (("fleet", "fleet.yml"), 2, "fleet.yml:1:1: fleet: the key `hub` is missing"),
        (
            (*MUTE, "--match", "vm=a", "--comment", "c", "--for", "9999999d"),
            2,
            "--for: expected 1m to 366d",
        ),
        (
            (*MUTE, "--match", "vm=a", "--comment", "c", "--for", "0s"),
            2,
            "--for: expected 1m to 366d",
        ),
        ((*MUTE, "--match", "vm=a", "--match", "vm=b"), 2, "--match: vm is given twice"),
        (
            (*MUTE, "--match", "scale_set"),
            2,
            "--match: expected NAME=VALUE, such as vm=web_0, got 'scale_set'",
        ),
        (
            (*MUTE, "--match", "event_type=Freez", "--comment", "c"),
            2,
            "no event has the type 'Freez': did you mean",
        ),
        (
            (*MUTE, "--match", "vm=a", "--comment", " "),
            2,
            "expected --match NAME=VALUE and --comment TEXT",
        ),
        (
            (*MUTE, "--for", "4h", "--comment", "c"),
            2,
            "expected --match NAME=VALUE and --comment TEXT, or --end ID",
        ),
        (("fleet", "report", "--by=colour"), 2, "there is no 'colour'"),
        (("fleet", "report", "--url=http://[::1"), 2, "expected http://HOST:PORT"),
        (("run", "often.yml"), 2, "often.yml:2:3: imds.interval: expected a duration"),
    ],
)
def test_wrong_arguments_are_answered_with_the_remedy(
    words: tuple[str, ...], code: int, mistake: str, run_command: RunCommand
) -> None:
    exit_code, _, error = run_command(*words)

    assert exit_code == code, error
    assert mistake in error, error


@pytest.mark.parametrize(
    ("words", "same"),
    [("-V", "--version"), ("demo --version", "--version"), ("help demo", "demo -h")],
)
def test_command_line_accepts_other_spellings(
    words: str, same: str, run_command: RunCommand
) -> None:
    code, output, error = run_command(*words.split())

    assert code == 0
    assert output
    assert run_command(*same.split()) == (code, output, error)


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Let a shell run `notbefore` with these words and redirections."""
    words = ["bash", "-c", f"{sys.executable} -m notbefore {command}"]
    return subprocess.run(
        words, capture_output=True, check=False, timeout=PATIENCE, env={**os.environ, **environment}
    )


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_full_output_is_an_error_in_one_line(unbuffered: str) -> None:
    done = shell("--version >/dev/full", PYTHONUNBUFFERED=unbuffered)

    assert done.stderr == b"notbefore: standard output cannot be written: No space left on device\n"
    assert done.returncode == 1


def test_closed_streams_cause_no_traceback() -> None:
    assert shell("--version >&-").stderr == b""
    assert shell("--version | true").stderr == b""
    assert shell("check-config <&- 2>&-").returncode == 0


def test_letter_that_the_terminal_lacks_is_shown_as_an_escape(agent: RunningAgent) -> None:
    done = shell(f"events --url {url(agent)}", PYTHONIOENCODING="latin-1")

    assert done.returncode == 0
    assert done.stderr == b""
    assert rb"WestNO_0, \u017eaba" in done.stdout


def test_configuration_may_come_through_a_pipe() -> None:
    # as `notbefore check-config <(sops --decrypt FILE)`
    done = shell(
        "check-config <(echo 'sinks: {a: {webhook: {url: \"https://example.org/?key=x\"}}}')"
    )

    assert b"is valid, with 1 warning" in done.stdout
    assert re.search(
        rb":1:23: sinks.a.webhook.url: this secret is plain text in the file", done.stderr
    )


@pytest.mark.long
def test_demo_shows_every_kind_of_end_and_stops() -> None:
    done = notbefore("demo")

    assert done.returncode == 0, done.stdout + done.stderr
    for kind in ("announced", "started", "finished", "canceled"):
        assert kind in done.stdout
    assert done.stdout.endswith(NEXT)


def test_demo_ends_with_the_commands_of_getting_started() -> None:
    guide = (ROOT / "docs" / "getting-started.md").read_text(encoding="utf-8")

    steps = [line.partition("#")[0] for line in NEXT.splitlines() if line.startswith("  ")]

    assert len(steps) == 3
    for step in steps:
        for command in step.split("&&"):
            assert command.strip() in guide
