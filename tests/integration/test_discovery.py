"""Looking for IMDS: the order, what is believed, and a VM whose IMDS is elsewhere, in a network of the test's own."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from notbefore.agent import polling
from notbefore.config.load import load
from notbefore.imds import client, elsewhere
from notbefore.imds.elsewhere import SearchStep, address_in
from notbefore.process.clock import Clock
from notbefore.simulator.server import Simulator
from support.agent import eventually, free_port, notbefore
from support.azure import FUTURE, body, item
from support.needs import needs
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
            imds.fault("error", times=1000)
            eventually(lambda: watcher.endpoint == other.endpoint)
            eventually(lambda: agent.known.vm_name == "second")


def test_who_is_only_late_is_not_looked_for_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "search", lambda *_: pytest.fail("it answers at the third poll"))
    with Simulator(vms=("late",)) as imds:
        monkeypatch.setattr(client, "USUAL", imds.endpoint)
        imds.fault("error", times=2)
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

    monkeypatch.setattr(polling, "SILENCE", 0.0)
    monkeypatch.setattr(polling, "SEARCH_PAUSE", 0.0)
    monkeypatch.setattr(elsewhere, "search", broken)
    with watching(tmp_path, endpoint=silent) as (_, watcher):
        eventually(lambda: len(searches) > 1)
        assert watcher.alive


# ---- a network of its own


class Net(NamedTuple):
    """Two namespaces: the host's side, where a simulator is, and the VM's."""

    host: str
    vm: str

    def command(self, side: str, *words: str) -> list[str]:
        # without the guard: in this network the address is nobody's
        return ["ip", "netns", "exec", side, "env", "-u", "PYTHONPATH", *words]

    def notbefore(self, side: str, *words: str) -> list[str]:
        return self.command(side, sys.executable, "-m", "notbefore", *words)


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=20)


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Net]:
    needs("root", "ip", "curl")
    tag = f"nb{os.getpid() % 100_000}"
    made = Net(f"{tag}h", f"{tag}v")
    at = tmp_path_factory.mktemp("net")
    with ExitStack() as stack:
        for side in made:
            run("ip", "netns", "add", side)
            stack.callback(run, "ip", "netns", "delete", side)
        run("ip", "-n", made.host, "link", "add", made.host, "type", "veth", "peer", made.vm, "netns", made.vm)
        for side, address in zip(made, ("10.99.0.1/24", "10.99.0.2/24"), strict=True):
            run("ip", "-n", side, "address", "add", address, "dev", side)
            for link in ("lo", side):
                run("ip", "-n", side, "link", "set", link, "up")
        log = stack.enter_context((at / "log").open("wb"))
        command = made.notbefore(made.host, "simulate", "--listen", "10.99.0.1:80")
        process = subprocess.Popen(command, stdout=log, stderr=log)
        stack.callback(process.wait, 20)
        stack.callback(process.terminate)
        probe = made.notbefore(made.vm, "discover", "--imds", "http://10.99.0.1")
        eventually(lambda: subprocess.run(probe, check=False, capture_output=True, timeout=60).returncode == 0)
        yield made


def test_an_agent_finds_it_by_itself_and_approves_there_as_well(net: Net, tmp_path: Path) -> None:
    config = tmp_path / "notbefore.yml"
    rule = {"match": {"event_source": "User"}, "action": "approve"}
    config.write_text(
        yaml.safe_dump({"approval": {"enabled": True, "dry_run": False, "rules": [rule]}}), encoding="utf-8"
    )
    words = net.notbefore(net.vm, "run", str(config), "--state-dir", str(tmp_path / "state"), "--allow-approval")
    words.insert(words.index("PYTHONPATH") + 1, "SCHEDULEDEVENTSIP=10.99.0.1")
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    log, records = Lines(process.stderr), Lines(process.stdout)
    health = net.notbefore(net.vm, "health", "--ready")
    try:
        eventually(lambda: subprocess.run(health, check=False, capture_output=True, timeout=60).returncode == 0, 60)
        listed = body(item(EventSource="User", NotBefore=FUTURE), incarnation=2)
        order = ("curl", "-sS", "-d", listed.decode(), "http://10.99.0.1/simulator/document")
        subprocess.run(net.command(net.vm, *order), check=True, capture_output=True, timeout=20)
        eventually(lambda: "approved" in records.of("azure.scheduled_event.change"))
    finally:
        process.terminate()
        process.wait(20)
        log.close()
        records.close()
    said = log.of("body")
    assert "where is IMDS? environment (SCHEDULEDEVENTSIP): http://10.99.0.1 answers" in said
    assert "IMDS is asked at http://10.99.0.1 from now on" in said
    assert "this VM is WestNO_0" in said


class Lines:
    """The JSON lines of a process, as they come."""

    def __init__(self, pipe: IO[bytes] | None) -> None:
        assert pipe is not None
        self._pipe = pipe
        self._lines: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        self._lines.extend(map(json.loads, self._pipe))

    def of(self, key: str) -> list[Any]:
        return [line.get(key) for line in self._lines]

    def close(self) -> None:
        self._thread.join(20)
        self._pipe.close()


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
