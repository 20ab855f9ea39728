"""The commands as a user types them, and their exit codes."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
import yaml

from notbefore import __version__
from notbefore.simulator.server import Simulator
from support.agent import RunningAgent, free_port, notbefore, run
from support.azure import FUTURE, ID, body, item


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    state = tmp_path_factory.mktemp("state")
    with Simulator() as imds, RunningAgent(imds.endpoint, state) as running:
        imds.set_document(body())
        running.ready()
        imds.set_document(body(item(NotBefore=FUTURE, Resources=["WestNO_0", "\u017eaba"]), incarnation=2))
        running.reported("announced")
        yield running


def url(agent: RunningAgent) -> str:
    return f"http://127.0.0.1:{agent.port}"


def test_the_version_is_printed_both_ways() -> None:
    for words in (("version",), ("--version",)):
        done = notbefore(*words)
        assert (done.returncode, done.stdout) == (0, f"notbefore {__version__}\n")


def test_without_a_command_it_says_what_there_is_with_the_exit_codes() -> None:
    done = notbefore()
    assert done.returncode == 2
    assert "simulate" in done.stdout
    assert "Exit codes" in done.stdout


@pytest.mark.parametrize("word", ["run", "check-config", "events", "history", "health", "simulate", "demo"])
def test_each_command_explains_itself(word: str) -> None:
    assert notbefore(word, "--help").returncode == 0


def test_events_shows_what_is_listed_as_a_table_and_as_json(agent: RunningAgent) -> None:
    table = notbefore("events", "--url", url(agent))
    assert table.returncode == 0
    assert "2058-03-01T12:00:00Z" in table.stdout
    assert ID in table.stdout
    (event,) = map(json.loads, notbefore("events", "--json", "--url", url(agent)).stdout.splitlines())
    assert (event["event_id"], event["scope"]) == (ID, "self")


def test_health_asks_the_address_that_is_configured(agent: RunningAgent) -> None:
    well = notbefore("health", NOTBEFORE_SERVER__LISTEN=f"0.0.0.0:{agent.port}")
    assert (well.returncode, well.stdout, well.stderr) == (0, "ok\n", "")
    gone = notbefore("health", NOTBEFORE_SERVER__LISTEN=f"127.0.0.1:{free_port()}")
    assert gone.returncode == 1
    assert "no agent answers" in gone.stderr


def test_history_shows_the_changes_as_a_table_and_as_json(agent: RunningAgent) -> None:
    assert "announced" in notbefore("history", "--url", url(agent)).stdout
    (change,) = map(json.loads, notbefore("history", "--json", "--url", url(agent)).stdout.splitlines())
    assert change["azure.scheduled_event.change"] == "announced"
    later = notbefore("history", "--url", url(agent), "--since", "2058-01-01T00:00:00+01:00")
    assert later.stdout == "No change has been seen.\n"


def test_history_reads_the_state_of_an_agent_that_has_stopped(tmp_path: Path) -> None:
    with Simulator() as imds:
        imds.set_document(body(item()))
        with RunningAgent(imds.endpoint, tmp_path) as stopped:
            stopped.ready().stop()
    done = notbefore("history", "--state-dir", str(tmp_path))
    assert (done.returncode, done.stdout.count(ID)) == (0, 1)
    assert notbefore("history", "--state-dir", str(tmp_path), "--since", "soon").returncode == 2
    assert notbefore("history", "--state-dir", str(tmp_path / "none")).returncode == 3


@pytest.mark.parametrize("command", ["events", "history"])
def test_when_no_agent_answers_it_says_what_to_do(command: str) -> None:
    done = notbefore(command, "--url", f"http://127.0.0.1:{free_port()}")
    assert done.returncode == 1
    assert "is `notbefore run` running" in done.stderr
    assert notbefore(command, "--url", "localhost:10169").returncode == 2


def test_a_bad_query_is_the_agents_word(agent: RunningAgent) -> None:
    done = notbefore("history", "--url", url(agent), "--limit", "1000000")
    assert done.returncode == 1
    assert "limit: expected a number" in done.stderr


@pytest.mark.parametrize("limit", ["-5", "0", "ten", "1.5"])
def test_a_limit_that_is_none_is_refused_as_what_it_is(limit: str) -> None:
    done = notbefore("history", "--limit", limit)
    assert done.returncode == 2
    assert f"argument --limit: expected a number of changes, 1 or more, got {limit}" in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("check-config", "--conect"), 2, "notbefore check-config: error: unrecognized arguments: --conect"),
        (("outbox", "retry", "a", "--all"), 2, "outbox retry: expected ids or --all, not both"),
        (("events", "--url", "https://127.0.0.1:9", "--ca-file", "no.pem"), 2, "no.pem: expected a certificate"),
        (("history", "--state-dir", "empty"), 3, "has `notbefore run` been started here?"),
        (("approve", "ID", "--state-dir", "empty"), 1, "empty/control.sock: is it running"),
        (("fleet", "fleet.yml"), 2, "fleet.yml:1:1: fleet: the key `hub` is missing"),
    ],
)
def test_what_is_typed_wrongly_is_answered_with_what_to_do(
    words: tuple[str, ...], code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fleet.yml").write_text("fleet: {}", encoding="utf-8")
    done = notbefore(*words)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr


def test_history_begins_at_a_time_or_so_long_ago(agent: RunningAgent, tmp_path: Path) -> None:
    assert "announced" in notbefore("history", "--url", url(agent), "--since", "1h").stdout
    assert notbefore("history", "--url", url(agent), "--since", "1ms").stdout == "No change has been seen.\n"
    wrong = notbefore("history", "--state-dir", str(tmp_path), "--since", "yesterday")
    assert (wrong.returncode, "--since: expected 30m, 1h or 2d" in wrong.stderr) == (2, True)


def test_each_answer_can_be_json(agent: RunningAgent) -> None:
    assert json.loads(notbefore("health", "--json", "--url", url(agent)).stdout)["status"] == "ok"
    assert json.loads(notbefore("version", "--json").stdout) == {"version": __version__}
    assert "user-reboot" in json.loads(notbefore("simulate", "--list", "--json").stdout)["scenarios"]
    asked = f"http://127.0.0.1:{free_port()}"
    first, *_ = notbefore("discover", "--json", "--imds", asked).stdout.splitlines()
    assert (json.loads(first)["found"], json.loads(first)["answers"]) == (asked, False)


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command of ours, which begins after `notbefore`, as a shell does."""
    words = ["bash", "-c", f"{sys.executable} -m notbefore {command}"]
    return subprocess.run(words, capture_output=True, check=False, timeout=60, env={**os.environ, **environment})


def test_what_watch_shows_in_sixty_columns_has_each_id_whole(agent: RunningAgent) -> None:
    shown = notbefore("events", "--url", url(agent)).stdout.splitlines()
    assert [ID in line[:60] for line in shown] == [False, True]
    assert shown[0][:60].split() == ["EVENT", "ID", "TYPE", "DUE"]


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["simulate --list", "simulate --list --json", "version"])
def test_an_output_that_takes_nothing_is_said_in_one_line(command: str, unbuffered: str) -> None:
    done = shell(f"{command} >/dev/full", PYTHONUNBUFFERED=unbuffered)
    assert done.stderr == b"notbefore: standard output cannot be written: No space left on device\n"
    assert done.returncode == 1


@pytest.mark.parametrize("word", ["--help", "--version", "demo --help", "simulate --list"])
def test_a_closed_output_or_a_reader_that_goes_away_is_no_traceback(word: str) -> None:
    assert shell(f"{word} >&-").stderr == b""
    assert shell(f"{word} | true").stderr == b""


def test_a_terminal_that_lacks_a_letter_is_shown_its_number(agent: RunningAgent) -> None:
    done = shell(f"events --url {url(agent)}", PYTHONIOENCODING="latin-1")
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"WestNO_0, \u017eaba" in done.stdout


@pytest.mark.parametrize(
    ("typed", "same"),
    [("-V", "version"), ("demo --version", "version"), ("help", "--help"), ("help demo", "demo --help")],
)
def test_it_is_understood_as_a_person_types_it(typed: str, same: str) -> None:
    done = notbefore(*typed.split())
    assert (done.returncode, done.stdout) == (0, notbefore(*same.split()).stdout)


def test_a_misspelt_command_is_answered_with_the_nearest_one() -> None:
    done = notbefore("event")
    assert (done.returncode, "there is no command 'event': did you mean 'events'?" in done.stderr) == (2, True)


# Root without CAP_DAC_OVERRIDE: permissions hold for it as for everybody, and it can still read an interpreter and an
# environment that stand in a directory of its own. Giving a capability up needs no right.
ORDINARY = """
import ctypes, sys
from notbefore.commands import main
DAC_OVERRIDE, VERSION_3 = 1 << 1, 0x20080522  # linux/capability.h
header, sets = (ctypes.c_uint32 * 2)(VERSION_3, 0), (ctypes.c_uint32 * 6)()
libc = ctypes.CDLL(None)
libc.capget(header, sets)
for effective_permitted_inheritable in range(3):
    sets[effective_permitted_inheritable] &= ~DAC_OVERRIDE
assert libc.capset(header, sets) == 0
sys.exit(main.main())
"""


def test_an_ordinary_user_is_shown_another_state_directory(tmp_path: Path) -> None:
    place = tmp_path / "below"
    place.mkdir(mode=0o500)
    done = run(sys.executable, "-c", ORDINARY, "run", "--state-dir", place / "state")
    assert (done.returncode, "Traceback" in done.stderr) == (3, False), done.stderr
    assert f"no permission for {place / 'state'}: use another directory, `--state-dir DIR`" in done.stderr


def test_a_machine_that_is_no_azure_vm_is_reported_once(tmp_path: Path) -> None:
    words = ("run", "--state-dir", tmp_path, "--listen", f"127.0.0.1:{free_port()}")
    done = run(sys.executable, "-c", NO_AZURE, *words, NOTBEFORE_LOG__FORMAT="text")
    assert done.stderr.count("This does not look like an Azure VM") == 1, done.stderr
    assert "notbefore demo" in done.stderr
    assert "where is IMDS" not in done.stderr


NO_AZURE = """
import signal, sys
from notbefore.commands.main import main
from notbefore.imds import client, elsewhere
client.USUAL = "http://127.0.0.1:9"
import notbefore.agent.polling as polling
polling.may_be_elsewhere = lambda _endpoint: True
searches = []
def search(self):
    searches.append(self)
    if len(searches) == 4:
        signal.raise_signal(signal.SIGTERM)
    yield elsewhere.SearchStep("configuration", "http://127.0.0.1:9", why="refused")
    yield elsewhere.SearchStep("dhclient (option 245)", why="no lease")
elsewhere.Discovery.search = search
polling.FIRST_TRIES = 1
polling.SEARCH_PAUSE = polling.LONGEST_SEARCH_PAUSE = 0.2
polling.IDENTITY_RETRY = polling.LONGEST_IDENTITY_RETRY = 0.2
sys.exit(main([*sys.argv[1:], "--imds", "http://127.0.0.1:9"]))
"""


def test_check_config_says_what_a_configuration_amounts_to(tmp_path: Path) -> None:
    path = tmp_path / "notbefore.yml"
    path.write_text("imds: {interval: 5s}\n", encoding="utf-8")
    done = notbefore("check-config", str(path), NOTBEFORE_VM__NAME="me")
    assert done.returncode == 0
    assert "interval: 5s" in done.stdout
    assert "name: me" in done.stdout
    assert (done.stdout.splitlines()[-1], done.stderr) == (f"# {path} is valid.", "")
    assert yaml.safe_load(done.stdout)["imds"]["interval"] == "5s", "what is printed is a configuration"
    warned = notbefore("check-config", str(path), "--strict", "--listen", "192.0.2.1:1", NOTBEFORE_SERVER__INSECURE="1")
    assert warned.returncode == 2
    assert warned.stdout.endswith("is valid, but there is one warning, which --strict refuses: see above.\n")


def test_a_configuration_may_come_through_a_pipe_and_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    # as `notbefore check-config <(sops --decrypt FILE)`
    words = [sys.executable, "-m", "notbefore", "check-config", "/dev/stdin"]
    said = subprocess.run(words, input=b"imds: {interval: 7s}", capture_output=True, check=True)
    assert b"interval: 7s" in said.stdout
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, why in ((pipe, "nobody writes into it"), (tmp_path, "this is a directory: name the file in it")):
        done = notbefore("check-config", str(path))
        assert (done.returncode, why in done.stderr, done.stdout) == (2, True, "")


def test_check_config_names_the_files_that_a_configuration_leads_to(tmp_path: Path) -> None:
    trustme.CA().issue_cert("vm.example.org").private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    (tmp_path / "key").write_text("key", encoding="utf-8")
    (tmp_path / "web.yml").write_text("tls_server_config: {cert_file: server.pem, key_file: server.pem}\n", "utf-8")
    path = tmp_path / "notbefore.yml"
    path.write_text(
        "server: {web_config_file: web.yml}\n"
        "sinks: {hook: {webhook: {url: 'https://example.org', secret_file: key}}}\n"
        "otlp: {endpoint: 'http://127.0.0.1:4318', headers: {api-key: {file: key}}}\n",
        encoding="utf-8",
    )
    done = notbefore("check-config", "--files", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    assert {Path(line).name for line in done.stdout.splitlines()} == {"web.yml", "key", "server.pem"}
    assert all(Path(line).parent == tmp_path for line in done.stdout.splitlines())


@pytest.mark.parametrize("command", ["check-config", "run"])
def test_a_bad_configuration_is_exit_code_two_with_the_place(tmp_path: Path, command: str) -> None:
    path = tmp_path / "notbefore.yml"
    path.write_text("imds:\n  interval: often\n", encoding="utf-8")
    done = notbefore(command, str(path))
    assert done.returncode == 2
    assert f"{path}:2:3: imds.interval: expected a duration" in done.stderr
    state = str(tmp_path / "state")
    wrong = notbefore(command, NOTBEFORE_IMDS__ENDPOINT="https://169.254.169.254", NOTBEFORE_STATE__DIR=state)
    assert wrong.returncode == 2


@pytest.mark.long
def test_the_demo_shows_every_kind_of_end_and_ends_by_itself() -> None:
    done = notbefore("demo")
    assert done.returncode == 0, done.stdout + done.stderr
    for kind in ("announced", "started", "finished", "canceled", "counting down"):
        assert kind in done.stdout
    assert "azure_scheduled_event_seconds_to_not_before{" in done.stdout
