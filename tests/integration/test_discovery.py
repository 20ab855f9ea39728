"""Looking for IMDS: the order of the places, and what is believed."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notbefore.agent import polling
from notbefore.config.load import load
from notbefore.imds import client, elsewhere
from notbefore.imds.elsewhere import SearchStep, address_in
from notbefore.process.clock import Clock
from notbefore.simulator.server import Simulator
from support.agent import eventually, free_port, notbefore
from support.raw_server import answer, serving
from support.tracking import Tracking

VERSION = "2020-07-01"
LEASES = Path(__file__).parent.parent / "leases"  # written by the clients themselves, but NetworkManager's


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> str:
    """The usual address, where nobody listens."""
    usual = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setattr(client, "USUAL", usual)
    return usual


def search(configured: str, root: Path = Path("/nowhere"), **environment: str) -> list[SearchStep]:
    return list(elsewhere.search(configured, VERSION, environment, root))


def test_who_answers_at_the_configured_place_is_not_looked_for_elsewhere(silent: str) -> None:
    with Simulator() as imds:
        assert search(imds.endpoint) == [SearchStep("configuration", imds.endpoint, answers=True)]
    (step,) = search("http://127.0.0.2:1")  # said by the user: no other place is tried
    assert (step.answers, "refused" in step.why) == (False, True)
    assert silent


def test_each_place_is_looked_at_in_its_order_and_says_why_not(silent: str, tmp_path: Path) -> None:
    (tmp_path / "run/systemd/netif/leases").mkdir(parents=True)
    (tmp_path / "run/systemd/netif/leases/2").write_text("ADDRESS=10.0.0.4\n", encoding="ascii")
    (tmp_path / "run/NetworkManager/devices/2").mkdir(parents=True)
    configured, environment, networkd, manager, dhclient = search(silent, tmp_path)
    assert configured.why.startswith("refused")
    assert str(environment) == "environment (SCHEDULEDEVENTSIP): not set"
    assert networkd.why.endswith("leases/2: no option 245")
    assert manager.why.endswith("devices/2: no file")
    assert str(dhclient) == "dhclient (option 245): no lease"


def test_the_first_that_answers_as_imds_does_is_taken(silent: str) -> None:
    with serving(answer(body=b'{"hello": "world"}')) as (other, _):
        assert "not a Scheduled Events document" in search(silent, SCHEDULEDEVENTSIP=other)[1].why
    assert not any(step.answers for step in search(silent, SCHEDULEDEVENTSIP="not an address"))
    with Simulator() as imds:
        found = search(silent, SCHEDULEDEVENTSIP=imds.endpoint.removeprefix("http://"))[-1]
    assert str(found) == f"environment (SCHEDULEDEVENTSIP): {imds.endpoint} answers"


@pytest.mark.parametrize(
    "case",
    [
        ("run/systemd/netif/leases/2", "networkd", "98.76.54.32"),
        ("var/lib/dhcp/dhclient.eth0.leases", "dhclient.leases", "10.99.0.1"),
        ("var/lib/dhcp/dhclient.eth0.leases", "dhclient-printable.leases", "98.76.54.32"),  # the newest, as text
        ("run/NetworkManager/devices/2", "network-manager", "168.63.129.16"),
    ],
)
def test_each_clients_files_are_found(
    silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[str, str, str]
) -> None:
    place, file, address = case
    monkeypatch.setattr(elsewhere, "PROBE_TIMEOUT", 0.01)  # the addresses are not ours to ask
    lease, path = (LEASES / file).read_bytes(), tmp_path / place
    path.parent.mkdir(parents=True)
    path.write_bytes(lease)
    assert [step.found for step in search(silent, tmp_path) if step.found] == [silent, f"http://{address}"]
    assert address_in(lease.replace(b"245", b"244")) is None


@pytest.mark.parametrize(
    ("value", "address"),
    [
        (b"a8:3f:81:10", "168.63.129.16"),
        (b'"b\\"6 "', "98.34.54.32"),
        (b'"\\250?\\201\\020"', "168.63.129.16"),
        (b"a8:3f:81:10:00", None),
        (b"a8:3f:81:100", None),
        (b"\xff", None),
        (b"0:0:0:0", None),  # what follows cannot be another machine
        (b"7f:0:0:1", None),
        (b"e0:0:0:1", None),
        (b"ff:ff:ff:ff", None),
    ],
)
def test_four_bytes_are_written_in_several_ways(value: bytes, address: str | None) -> None:
    assert address_in(b"lease {\n  option unknown-245 " + value + b";\n}\n") == address


@given(st.binary(max_size=600))
def test_no_bytes_break_the_parser(noise: bytes) -> None:
    for text in (noise, b"OPTION_245=" + noise, b"option unknown-245 " + noise + b";"):
        found = address_in(text)
        assert found is None or len(found.split(".")) == 4


@contextmanager
def watching(directory: Path, **settings: str) -> Iterator[tuple[Tracking, polling.Polling]]:
    """The polling of an agent, with its state."""
    imds = {f"imds.{name}": value for name, value in {"interval": "200ms", **settings}.items()}
    agent = Tracking(directory, Clock())
    watcher = polling.Polling(load(None, {}, imds), agent.tracker, agent.state)
    watcher.start()
    try:
        yield agent, watcher
    finally:
        watcher.stop()
        agent.close()


def test_what_was_found_is_kept_until_it_is_silent_for_long(
    silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polling, "SILENCE", 1.0)
    monkeypatch.setattr(polling, "SEARCH_PAUSE", 0.5)
    with Simulator(vms=("first",)) as imds, Simulator(vms=("second",)) as other:
        monkeypatch.setenv("SCHEDULEDEVENTSIP", imds.endpoint)
        with watching(tmp_path, endpoint=silent) as (agent, watcher):
            eventually(lambda: agent.known.vm_name == "first" and agent.known.poll.answered)
            monkeypatch.setenv("SCHEDULEDEVENTSIP", other.endpoint)
            asked = imds.requests
            eventually(lambda: imds.requests > asked + 10)  # two seconds of polls
            assert watcher.endpoint == imds.endpoint
            imds.fault("status", times=1000)
            eventually(lambda: watcher.endpoint == other.endpoint)
            eventually(lambda: agent.known.vm_name == "second")


def test_who_is_only_late_is_not_looked_for_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "search", lambda *_: pytest.fail("it answers at the third poll"))
    with Simulator(vms=("late",)) as imds:
        monkeypatch.setattr(client, "USUAL", imds.endpoint)
        imds.fault("status", times=2)
        with watching(tmp_path, endpoint=imds.endpoint) as (agent, watcher):
            eventually(lambda: agent.known.vm is not None and agent.known.poll.answered)
            assert watcher.alive


def test_a_search_that_breaks_is_said_and_tried_again(
    silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches: list[str] = []

    def broken(endpoint: str, _version: str) -> Iterator[SearchStep]:
        searches.append(endpoint)
        raise OSError(97, "nobody foresaw this")

    monkeypatch.setattr(polling, "FIRST_SILENCE", 0.0)
    monkeypatch.setattr(polling, "SEARCH_PAUSE", 0.0)
    monkeypatch.setattr(elsewhere, "search", broken)
    with watching(tmp_path, endpoint=silent) as (_, watcher):
        eventually(lambda: len(searches) > 1)
        assert watcher.alive


def test_places_that_are_silent_are_no_thread_that_hangs(
    silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[str] = []

    def slow(endpoint: str, _version: str) -> Iterator[SearchStep]:
        for place in ("configuration", "environment", "lease"):
            time.sleep(1.0)
            searched.append(place)
            yield SearchStep(place, endpoint, why="timeout")

    monkeypatch.setattr(polling, "FIRST_SILENCE", 0.5)
    monkeypatch.setattr(elsewhere, "search", slow)
    with watching(tmp_path, endpoint=silent) as (_, watcher):
        overdue = []
        while len(searched) < 3:
            overdue.append(watcher.overdue)
            time.sleep(0.02)
        assert max(overdue) < 2  # by what the slowest place took, not by all of them


def test_the_command_says_where_it_is(tmp_path: Path) -> None:
    with Simulator() as imds:
        done = notbefore("discover", "--imds", imds.endpoint, "--state-dir", str(tmp_path))
        assert (done.returncode, done.stdout) == (0, f"configuration: {imds.endpoint} answers\n")
    assert notbefore("discover", "--imds", imds.endpoint).returncode == 1
    done = notbefore("discover", "--imds", imds.endpoint, NOTBEFORE_IMDS__DISCOVER="false")
    assert done.returncode == 1
    refusal, conclusion = done.stdout.splitlines()[1:]
    assert refusal == "imds.discover is false: no other place is looked at"
    assert conclusion.startswith("IMDS was not found.")
