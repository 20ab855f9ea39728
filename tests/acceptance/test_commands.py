"""The commands as a user types them, and their exit codes."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from notbefore import __version__
from notbefore.simulator.server import Simulator
from support.agent import RunningAgent, free_port, notbefore
from support.azure import ID, body, item


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    state = tmp_path_factory.mktemp("state")
    with Simulator() as imds, RunningAgent(imds.endpoint, state) as running:
        imds.set_document(body())
        running.ready()
        imds.set_document(body(item(NotBefore="Fri, 01 Mar 2058 12:00:00 GMT"), incarnation=2))
        running.told("announced")
        yield running


def url(agent: RunningAgent) -> str:
    return f"http://127.0.0.1:{agent.port}"


def test_the_version_is_told_both_ways() -> None:
    for words in (("version",), ("--version",)):
        told = notbefore(*words)
        assert (told.returncode, told.stdout) == (0, f"notbefore {__version__}\n")


def test_without_a_command_it_says_what_there_is_with_the_exit_codes() -> None:
    told = notbefore()
    assert told.returncode == 2
    assert "simulate" in told.stdout
    assert "Exit codes" in told.stdout


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
    told = notbefore("history", "--state-dir", str(tmp_path))
    assert (told.returncode, told.stdout.count(ID)) == (0, 1)
    assert notbefore("history", "--state-dir", str(tmp_path), "--since", "soon").returncode == 2
    assert notbefore("history", "--state-dir", str(tmp_path / "none")).returncode == 3


def test_a_reader_that_goes_away_is_no_traceback(agent: RunningAgent) -> None:
    command = f"{sys.executable} -m notbefore history --json --url {url(agent)} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, check=False, timeout=60)
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["events", "history"])
def test_when_no_agent_answers_it_says_what_to_do(command: str) -> None:
    told = notbefore(command, "--url", f"http://127.0.0.1:{free_port()}")
    assert told.returncode == 1
    assert "is `notbefore run` running" in told.stderr
    assert notbefore(command, "--url", "localhost:10169").returncode == 2


def test_a_bad_query_is_the_agents_word(agent: RunningAgent) -> None:
    told = notbefore("history", "--url", url(agent), "--limit", "0")
    assert told.returncode == 1
    assert "limit: expected a number" in told.stderr


def test_check_config_says_what_a_configuration_amounts_to(tmp_path: Path) -> None:
    path = tmp_path / "notbefore.yml"
    path.write_text("imds: {interval: 5s}\n", encoding="utf-8")
    told = notbefore("check-config", str(path), NOTBEFORE_VM__NAME="me")
    assert told.returncode == 0
    assert "interval: 5s" in told.stdout
    assert "name: me" in told.stdout


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
    told = notbefore("check-config", "--files", str(path))
    assert (told.returncode, told.stderr) == (0, "")
    assert {Path(line).name for line in told.stdout.splitlines()} == {"web.yml", "key", "server.pem"}
    assert all(Path(line).parent == tmp_path for line in told.stdout.splitlines())


@pytest.mark.parametrize("command", ["check-config", "run"])
def test_a_bad_configuration_is_exit_code_two_with_the_place(tmp_path: Path, command: str) -> None:
    path = tmp_path / "notbefore.yml"
    path.write_text("imds:\n  interval: often\n", encoding="utf-8")
    told = notbefore(command, str(path))
    assert told.returncode == 2
    assert f"{path}:2: imds.interval: expected a duration" in told.stderr
    state = str(tmp_path / "state")
    wrong = notbefore(command, NOTBEFORE_IMDS__ENDPOINT="https://169.254.169.254", NOTBEFORE_STATE__DIR=state)
    assert wrong.returncode == 2


def test_the_demo_shows_every_kind_of_end_and_ends_by_itself() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "notbefore", "demo"], capture_output=True, text=True, check=False, timeout=90
    )
    assert told.returncode == 0, told.stdout + told.stderr
    for kind in ("announced", "started", "finished", "canceled", "counting down"):
        assert kind in told.stdout
    assert "azure_scheduled_event_seconds_to_not_before{" in told.stdout
