"""``notbefore simulate`` as a process: its output, its answers and its end."""

import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from notbefore.commands import hub_writer
from notbefore.commands.main import main
from notbefore.fleet.azure_messages import read_messages
from notbefore.simulator.event_grid import STEPS, DeliveryFaults, EventGrid
from notbefore.simulator.state import NAMED, SimulatorState
from support.agent import PATIENCE, eventually, get
from support.hub import Hub

PATH = "/metadata/scheduledevents?api-version=2020-07-01"


@contextmanager
def simulating(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the command; yield the process and the address that it prints."""
    command = [sys.executable, "-m", "notbefore", "simulate", "--listen", "127.0.0.1:0", *words]
    # the background jobs of a shell ignore SIGINT, and so would their children
    previous_handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        signal.signal(signal.SIGINT, previous_handler)
        assert process.stdout is not None
        address = process.stdout.readline().partition("notbefore run --imds ")[2].rstrip("\n")
        try:
            yield process, address
        finally:
            process.kill()


def statuses_of(hub: Hub) -> Counter[str]:
    """Return the statuses in the messages that the hub has stored, and how often each occurs."""
    messages = [read_messages(stored.body) for stored in hub.stored]
    return Counter(message.reports[0].status for message in messages if message is not None)


def ask(address: str, path: str = PATH) -> Any:
    """Return the document in an answer, or the status of an error."""
    status, body = get(int(address.rpartition(":")[2]), path, Metadata="true")
    if status != 200:
        return status
    return msgspec.json.decode(body)


def test_simulate_prints_an_endpoint_for_each_vm() -> None:
    with simulating("--vm", "a_0", "b_1") as (process, address):
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        instance = ask(address, "/vm/b_1/metadata/instance?api-version=2021-02-01")

    assert lines == [f"  a_0: {address}/vm/a_0\n", f"  b_1: {address}/vm/b_1\n"]
    assert instance["compute"]["name"] == "b_1"


def test_simulate_applies_each_fault_to_one_answer() -> None:
    with simulating("--fault", "status:599", "--fault", "status") as (_, address):
        assert ask(address) == 599
        assert ask(address) == 500
        assert ask(address)["Events"] == []


def test_simulate_cancels_the_event_of_a_scenario(tmp_path: Path) -> None:
    # the hub keeps both messages, however late the test looks
    with Hub(tmp_path, partitions=1) as hub:
        (tmp_path / "hub-key").write_text(hub.connection_string(), encoding="utf-8")
        words = ("--scenario", "user-reboot", "--cancel", "--speed", "600")

        with simulating(*words, "--event-grid", str(tmp_path / "hub-key")) as (_, address):
            eventually(lambda: statuses_of(hub).keys() == {"Scheduled", "Canceled"})

            assert ask(address)["Events"] == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_simulate_ends_with_code_0_on_a_signal(number: signal.Signals) -> None:
    with simulating("--scenario", "user-reboot") as (process, _):
        process.send_signal(number)

        out, err = process.communicate(timeout=PATIENCE)

        assert process.returncode == 0
        assert err == ""
        assert "Traceback" not in out


@pytest.mark.parametrize(
    "words",
    [
        ("--listen", "nowhere"),
        ("--speed", "nan"),
        ("--scenario", "earthquake"),
        ("--listen", "127.0.0.1:0", "--fault", "freeze:soon"),
        ("--listen", "127.0.0.1:0", "--fault", "status:0"),
    ],
)
def test_simulate_ends_with_code_2_when_an_argument_is_wrong(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:  # as the shell's `exit`
        sys.exit(main(["simulate", *words]))

    error = capsys.readouterr().err

    assert ended.value.code == 2
    assert words[-2] in error
    assert "expected" in error or "choose from" in error


def test_simulate_ends_with_code_3_when_its_address_is_in_use(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = occupied.getsockname()[1]

        exit_code = main(["simulate", "--listen", f"127.0.0.1:{port}"])

    assert exit_code == 3
    assert "cannot listen" in capsys.readouterr().err


@pytest.mark.parametrize("schema", ["event-grid", "cloud-events"])
def test_simulate_sends_the_messages_of_event_grid(schema: str, tmp_path: Path) -> None:
    with Hub(tmp_path, partitions=2) as hub:
        (tmp_path / "hub-key").write_text(hub.connection_string(), encoding="utf-8")
        words = ("--event-grid", str(tmp_path / "hub-key"), "--event-grid-schema", schema)
        scenario = ("--scenario", "user-reboot", "--speed", "600", "--event-grid-fault", "repeat")

        # more than twice if the hub is slow: then the simulator sends a batch again
        with simulating(*words, *scenario):
            eventually(lambda: min(statuses_of(hub)[status] for status in STEPS) >= 2)

        statuses = statuses_of(hub).keys()
        partitions = {stored.partition for stored in hub.stored}

    assert statuses == set(STEPS)
    assert len(partitions) == 1


def test_simulate_sends_messages_again_until_the_hub_accepts_them(tmp_path: Path) -> None:
    hub = Hub(tmp_path, partitions=1)
    (tmp_path / "hub-key").write_text(hub.connection_string(), encoding="utf-8")

    with simulating(
        "--event-grid", str(tmp_path / "hub-key"), "--scenario", "user-reboot"
    ) as running:
        process, _ = running
        assert process.stderr is not None
        assert "the hub did not accept messages" in process.stderr.readline()
        with hub:
            eventually(lambda: hub.stored)


def test_hub_writer_drops_the_oldest_messages_while_the_hub_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hub_writer, "MAX_WAITING", 2)
    monkeypatch.setattr(hub_writer, "RETRY_AFTER", 0.0)
    hub = Hub(tmp_path, partitions=1)
    path = tmp_path / "hub-key"
    path.write_text(hub.connection_string(), encoding="utf-8")
    simulator = SimulatorState(["web_0"], speed=1.0)
    event_ids = [simulator.start(NAMED["user-reboot"].name) for _ in range(5)]
    event_grid = EventGrid(simulator, "event-grid", DeliveryFaults())

    with hub_writer.make_hub_writer(path, event_grid) as writer:

        def has_written() -> bool:
            writer.write_due()
            return len(hub.stored) >= 2

        writer.write_due()
        with hub:
            eventually(has_written)
            messages = [read_messages(stored.body) for stored in hub.stored]

    sent = [message.reports[0].event.event_id for message in messages if message is not None]
    # a batch is sent again if the hub accepts it too late
    without_repetitions = list(dict.fromkeys(sent))
    assert without_repetitions == event_ids[-2:]
    assert "3 messages were dropped, the oldest ones: at most 2 wait for the hub" in caplog.text


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", "no connection string"), ("Endpoint=sb://h/;SharedAccessKey=k", "EntityPath")],
)
def test_simulate_refuses_a_file_that_names_no_hub(
    text: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "hub-key"
    path.write_text(text, encoding="utf-8")

    exit_code = main(["simulate", "--listen", "127.0.0.1:0", "--event-grid", str(path)])

    assert exit_code == 2
    assert expected in capsys.readouterr().err


def test_simulate_refuses_a_wrong_delivery_fault(capsys: pytest.CaptureFixture[str]) -> None:
    exit_code = main(["simulate", "--event-grid-fault", "lost"])

    assert exit_code == 2
    assert "KIND is late, reorder, repeat" in capsys.readouterr().err
