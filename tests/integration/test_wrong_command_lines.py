"""Ways to write the command line that people try, and what the commands answer."""

from pathlib import Path

import pytest

from notbefore.commands import drill
from notbefore.commands.main import main, parsed
from notbefore.config.load import load
from notbefore.process.control_socket import NAME
from notbefore.simulator.server import Simulator
from notbefore.simulator.state import NAMED
from support.agent import RunningAgent, notbefore
from support.azure import ME


@pytest.mark.parametrize(
    "words",
    [
        ["run", "x.yml"],
        ["run", "--config", "x.yml"],
        ["run", "--config=x.yml"],
        ["--config", "x.yml", "run"],
        ["--config=x.yml", "run"],
        ["--config", "x.yml", "health", "--ready"],
        ["events", "--config", "x.yml"],
        ["drill", "--config", "x.yml", "--sink", "a"],
        ["check-config", "--config", "x.yml"],
        ["--config", "x.yml", "outbox", "list"],
        ["--config", "x.yml", "fleet", "report"],
    ],
    ids=" ".join,
)
def test_configuration_is_an_argument_or_an_option(words: list[str]) -> None:
    assert parsed(words).config == Path("x.yml")


def test_configuration_in_two_ways_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed(["run", "a.yml", "--config", "b.yml"])

    assert ended.value.code == 2
    assert "CONFIG is given twice" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["check-config", ""], ["run", "--config", ""]])
def test_empty_configuration_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed(words)

    assert ended.value.code == 2
    assert "expected a file, got an empty text" in capsys.readouterr().err


def test_mistake_in_an_option_names_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--imds", "ftp://127.0.0.1"]) == 2

    message = capsys.readouterr().err
    assert message.startswith("notbefore: the command line: imds.endpoint: expected http://")


def test_drill_without_configuration_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drill"]) == 2
    assert "expected CONFIG" in capsys.readouterr().err


def test_log_level_warn_is_read(tmp_path: Path) -> None:
    config = tmp_path / "notbefore.yml"
    config.write_text("log: {level: warn, format: text}", encoding="utf-8")

    result = notbefore("check-config", config)

    assert result.returncode == 0
    assert result.stderr == ""
    assert load(config, {}, {}).log.level == "warn"


def test_simulate_has_the_scenarios_of_drill_and_one_more() -> None:
    assert NAMED.keys() - drill.SCENARIOS.keys() == {"canceled-maintenance"}


@pytest.mark.parametrize("name", drill.SCENARIOS)
def test_scenario_has_the_same_event_type_in_drill_and_simulate(name: str) -> None:
    assert NAMED[name].event_type == drill.SCENARIOS[name]


def test_simulate_takes_several_scenarios_and_drill_one() -> None:
    simulate = parsed(["simulate", "--scenario", "reboot"])
    exercise = parsed(["drill", "x", "--scenario", "user-reboot"])

    assert simulate.scenario == ["reboot"]
    assert exercise.scenario == "user-reboot"


def test_commands_ask_the_agent_at_a_socket(tmp_path: Path) -> None:
    values = {"log": {"level": "warn"}}
    with (
        Simulator((ME,)) as imds,
        RunningAgent(imds.endpoint, tmp_path / "state", values) as agent,
    ):
        agent.wait_until_listening()

        listed = notbefore("outbox", "list", "--socket", agent.state / NAME)
        elsewhere = notbefore("outbox", "list", "--socket", tmp_path / NAME)
        no_socket = notbefore("outbox", "list", "--socket", agent.state)
        approved = notbefore("approve", "x", "--yes", "--socket", agent.state / NAME)

        assert listed.returncode == 0
        assert elsewhere.returncode == 3
        assert no_socket.returncode == 2
        assert approved.returncode == 1
        assert "nothing is sent" in approved.stderr
