"""Looking for IMDS: the order, what is believed, and a VM whose IMDS is elsewhere, in a network of the test's own."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, NamedTuple

import pytest
import yaml

from notbefore.agent import polling as watchers
from notbefore.config.load import load
from notbefore.imds import client
from notbefore.imds import elsewhere as module
from notbefore.imds.elsewhere import Discovery, Places, SearchStep
from notbefore.process.clock import Clock
from notbefore.simulator.server import Simulator
from support.agent import eventually, free_port, notbefore
from support.azure import FUTURE, body, item
from support.needs import needs
from support.raw_server import answer, serving
from support.tracking import Tracking

VERSION = "2020-07-01"
LEASES = Path(__file__).parent.parent / "leases"


def nobody() -> str | None:
    return None


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> str:
    """The usual address, where nobody listens."""
    usual = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setattr(client, "USUAL", usual)
    return usual


def search(configured: str, **places: Any) -> list[SearchStep]:
    nowhere: dict[str, Any] = {"environment": {}, "root": Path("/nowhere"), "registry": nobody}
    return list(Discovery(configured, VERSION, Places(**{**nowhere, **places})).search())


def test_who_answers_at_the_configured_place_is_not_looked_for_elsewhere(silent: str) -> None:
    with Simulator() as imds:
        assert search(imds.endpoint) == [SearchStep("configuration", imds.endpoint, answers=True)]
    (step,) = search("http://127.0.0.2:1")  # said by the user: no other place is tried
    assert (step.answers, "refused" in step.why) == (False, True)
    assert silent


def test_each_place_is_looked_at_in_its_order_and_says_why_not(silent: str, tmp_path: Path) -> None:
    def no_key() -> str | None:
        raise FileNotFoundError(2, "no such key")

    (tmp_path / "run/systemd/netif/leases").mkdir(parents=True)
    (tmp_path / "run/systemd/netif/leases/2").write_text("ADDRESS=10.0.0.4\n", encoding="ascii")
    (tmp_path / "run/NetworkManager/devices/2").mkdir(parents=True)
    steps = search(silent, root=tmp_path, registry=no_key)
    assert [step.place.split(" ")[0] for step in steps] == [
        "configuration", "environment", "systemd-networkd", "NetworkManager", "dhclient", "Windows",
    ]  # fmt: skip
    why = [step.why for step in steps]
    assert why[0].startswith("refused")
    assert why[1] == "not set"
    assert why[2].endswith("leases/2: no option 245")
    assert why[3].endswith("devices/2: no file")
    assert why[4:] == ["no lease", "no such key"]


def test_a_folder_that_is_not_for_us_is_not_taken_for_an_empty_one() -> None:
    needs("root")
    with TemporaryDirectory() as name:  # tmp_path is root's alone
        root = Path(name)
        root.chmod(0o755)
        (root / "var/lib/dhcp").mkdir(parents=True, mode=0o700)
        os.seteuid(65_534)  # for this one look: what is imported meanwhile would be missed for good
        try:
            readable = [module._is_readable(root / folder) for folder in ("var/lib/dhcp", "var/lib", "none")]
        finally:
            os.seteuid(0)
    assert readable == [False, True, True]


def test_the_first_that_answers_as_imds_does_is_taken(silent: str) -> None:
    with Simulator() as imds, serving(answer(body=b'{"hello": "world"}')) as (other, _):
        steps = search(
            silent,
            environment={"SCHEDULEDEVENTSIP": other},
            registry=lambda: imds.endpoint.removeprefix("http://"),
        )
    assert "not a Scheduled Events document" in steps[1].why
    assert steps[-1] == SearchStep("Windows registry", imds.endpoint, answers=True)
    assert str(steps[-1]) == f"Windows registry: {imds.endpoint} answers"


def test_the_registry_is_the_last_place(silent: str) -> None:
    with Simulator() as imds:
        assert search(silent, registry=lambda: imds.endpoint)[-1].answers
    assert not search(silent, registry=lambda: "not an address")[-1].answers
    assert module.read_registry() is None  # this is no Windows


@pytest.mark.parametrize(
    "case",
    [
        ("run/systemd/netif/leases/2", "networkd", "98.76.54.32"),
        ("var/lib/dhcp/dhclient.eth0.leases", "dhclient.leases", "10.99.0.1"),
        ("run/NetworkManager/devices/2", "network-manager", "168.63.129.16"),
    ],
)
def test_each_clients_files_are_found(
    silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[str, str, str]
) -> None:
    place, file, address = case
    monkeypatch.setattr(Discovery, "_probe", lambda *_: "nobody is asked here")  # the addresses are not ours to ask
    path = tmp_path / place
    path.parent.mkdir(parents=True)
    path.write_bytes((LEASES / file).read_bytes())
    assert [step.found for step in search(silent, root=tmp_path) if step.found] == [silent, f"http://{address}"]


def test_what_was_found_is_kept_until_it_is_silent_for_long(
    silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchers, "SILENCE", 1.0)
    monkeypatch.setattr(watchers, "SEARCH_PAUSE", 0.5)
    config = load(None, {}, {"imds.endpoint": silent, "imds.interval": "200ms"})
    agent = Tracking(tmp_path, Clock())
    with Simulator(vms=("first",)) as imds, Simulator(vms=("second",)) as other:
        monkeypatch.setenv("SCHEDULEDEVENTSIP", imds.endpoint)
        watcher = watchers.Polling(config, agent.tracker, agent.state)
        watcher.start()
        try:
            eventually(lambda: agent.known.vm_name == "first" and agent.known.poll.answered)
            monkeypatch.setenv("SCHEDULEDEVENTSIP", other.endpoint)
            asked = imds.requests
            eventually(lambda: imds.requests > asked + 10)  # two seconds of beats
            assert watcher.endpoint == imds.endpoint
            imds.fault("error", times=1000)
            eventually(lambda: watcher.endpoint == other.endpoint)
            eventually(lambda: agent.known.vm_name == "second")
            slower = load(None, {}, {"imds.endpoint": silent, "imds.interval": "2s"})
            held = load(None, {}, {"imds.endpoint": silent, "imds.discover": "false"})
            anew = [
                watchers.Polling(config, agent.tracker, agent.state, watcher) for config in (slower, held)
            ]  # as a reload does
            assert [one.endpoint for one in anew] == [other.endpoint, silent]
            assert watchers.Polling(slower, agent.tracker, agent.state, anew[1]).endpoint == silent
        finally:
            watcher.stop()
            agent.close()


def test_who_is_only_late_is_not_looked_for_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Discovery, "search", lambda _: pytest.fail("it answers at the second try"))
    agent = Tracking(tmp_path, Clock())
    with Simulator(vms=("late",)) as imds:
        monkeypatch.setattr(client, "USUAL", imds.endpoint)
        imds.fault("error", times=2)
        watcher = watchers.Polling(load(None, {}, {"imds.endpoint": imds.endpoint}), agent.tracker, agent.state)
        watcher.start()
        try:
            eventually(lambda: agent.known.vm is not None and agent.known.poll.answered)
            assert watcher.alive
            assert watcher._searches == 0
        finally:
            watcher.stop()
            agent.close()


def test_a_search_that_breaks_is_said_and_tried_again(
    silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> str | None:
        raise OSError(97, "nobody foresaw this")

    monkeypatch.setattr(watchers, "SEARCH_PAUSE", 0.0)
    monkeypatch.setattr(Discovery, "search", lambda _: broken())
    agent = Tracking(tmp_path, Clock())
    watcher = watchers.Polling(
        load(None, {}, {"imds.endpoint": silent, "imds.interval": "200ms"}), agent.tracker, agent.state
    )
    watcher.start()
    try:
        eventually(lambda: caplog.text.count("nobody foresaw this") > 1)
        assert watcher.alive
    finally:
        watcher.stop()
        agent.close()


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
