"""The search for IMDS at other addresses, and the choice of the api-version."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notbefore.agent import polling
from notbefore.agent.thread_guard import ThreadGuard
from notbefore.config.load import load
from notbefore.imds import elsewhere
from notbefore.imds.answer import ImdsAnswer
from notbefore.imds.client import FALLBACK, NEWEST, ImdsClient
from notbefore.imds.elsewhere import address_in, candidates, why_not
from notbefore.process.clock import Clock
from notbefore.simulator.server import Simulator
from support.agent import PATIENCE, eventually, free_port, wait_for_polls
from support.raw_server import answer, serving
from support.tracking import Tracking

VERSION = "2020-07-01"
# files that the DHCP clients themselves have written, except NetworkManager's
LEASES = Path(__file__).parent.parent / "leases"


def use_as_usual_address(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "ENDPOINT", endpoint)
    monkeypatch.setattr(elsewhere, "ENDPOINT", endpoint)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> str:
    """The usual address of IMDS, at which no server listens."""
    endpoint = f"http://127.0.0.1:{free_port()}"
    use_as_usual_address(endpoint, monkeypatch)
    return endpoint


def test_registry_of_windows_is_tried_after_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = tmp_path / "run/systemd/netif/leases/2"
    lease.parent.mkdir(parents=True)
    lease.write_bytes((LEASES / "networkd").read_bytes())
    monkeypatch.setattr(elsewhere, "registry_address", lambda: "192.0.2.7")

    places = list(candidates({"SCHEDULEDEVENTSIP": " http://192.0.2.1:8080 "}, tmp_path))

    assert places == [
        ("the usual address", "http://169.254.169.254"),
        ("SCHEDULEDEVENTSIP", "http://192.0.2.1:8080"),
        ("the registry", "http://192.0.2.7"),
        (str(lease), "http://98.76.54.32"),
    ]


LEASE_FILES = {
    "networkd": "run/systemd/netif/leases/2",
    "network-manager": "run/NetworkManager/devices/2",
    "dhclient.leases": "var/lib/dhcp/dhclient.eth0.leases",
}


def test_candidates_are_read_from_each_place_in_order(tmp_path: Path) -> None:
    for name, place in LEASE_FILES.items():
        path = tmp_path / place
        path.parent.mkdir(parents=True)
        path.write_bytes((LEASES / name).read_bytes())
    networkd = tmp_path / "run/systemd/netif/leases"
    (networkd / "a-directory").mkdir()
    (networkd / "without-the-option").write_text("ADDRESS=10.0.0.4\n", encoding="ascii")

    endpoints = [
        endpoint for _, endpoint in candidates({"SCHEDULEDEVENTSIP": "192.0.2.1"}, tmp_path)
    ]

    assert endpoints == [
        "http://169.254.169.254",
        "http://192.0.2.1",
        "http://98.76.54.32",
        "http://168.63.129.16",
        "http://10.99.0.1",
    ]


def test_usual_address_is_the_only_candidate_without_other_places() -> None:
    assert len(list(candidates({}, Path("/nowhere")))) == 1


@pytest.mark.parametrize("name", LEASE_FILES)
def test_lease_without_azures_option_has_no_address(name: str) -> None:
    lease = (LEASES / name).read_bytes()

    assert address_in(lease.replace(b"245", b"244")) == ""


def test_scheduled_events_document_identifies_imds() -> None:
    with Simulator() as imds:
        assert why_not(imds.endpoint, VERSION) == ""


def test_other_document_does_not_identify_imds() -> None:
    with serving(answer(body=b'{"hello": "world"}')) as (other, _):
        assert "not a Scheduled Events document" in why_not(other, VERSION)


def test_reason_against_an_address_is_its_failure(silent: str) -> None:
    assert why_not(silent, VERSION).startswith("refused")
    assert why_not("http://not an address", VERSION).startswith("imds.endpoint: ")


@pytest.mark.parametrize(
    ("value", "address"),
    [
        (b"a8:3f:81:10", "168.63.129.16"),
        (b"a83f8110", "168.63.129.16"),
        (b"a8:3f:81:10:00", ""),
        (b"a8:3f:81:100", ""),
        (b"a8:3f81:10", ""),
        (b"a8::81:10", ""),
        (b"\xff", ""),
        # not the address of another machine
        (b"0:0:0:0", ""),
        (b"7f:0:0:1", ""),
        (b"e0:0:0:1", ""),
        (b"ff:ff:ff:ff", ""),
    ],
)
def test_address_is_read_from_both_spellings_of_its_bytes(value: bytes, address: str) -> None:
    assert address_in(b"lease {\n  option unknown-245 " + value + b";\n}\n") == address


@given(st.binary(max_size=600))
def test_parser_of_leases_accepts_any_bytes(noise: bytes) -> None:
    for text in (noise, b"OPTION_245=" + noise, b"option unknown-245 " + noise + b";"):
        address = address_in(text)
        assert address == "" or len(address.split(".")) == 4


def version_of(agent: Tracking) -> str:
    return agent.snapshot.poll.api_version


def test_auto_uses_the_newest_version_that_imds_answers(tmp_path: Path) -> None:
    with Simulator() as imds, watching(tmp_path, endpoint=imds.endpoint) as (agent, _):
        eventually(lambda: agent.snapshot.poll.answered)

        assert version_of(agent) == NEWEST


@pytest.mark.parametrize("status", [400, 404])
def test_auto_falls_back_when_imds_refuses_the_newest_version(
    status: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    with Simulator() as imds:
        imds.refuse_version(NEWEST, status)

        with watching(tmp_path, endpoint=imds.endpoint) as (agent, _):
            wait_for_polls(imds, 5)

            assert version_of(agent) == FALLBACK
            assert agent.runtime.current.api_version == FALLBACK
            assert agent.snapshot.poll.failure is None

    assert sum("does not know api-version" in line for line in caplog.messages) == 1


def test_auto_asks_for_the_newest_version_again_after_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polling, "NEWEST_RETRY", 1.0)
    with Simulator() as imds:
        imds.refuse_version(NEWEST, 400)
        with watching(tmp_path, endpoint=imds.endpoint) as (agent, _):
            eventually(lambda: version_of(agent) == FALLBACK)

            imds.clear()

            eventually(lambda: version_of(agent) == NEWEST)
            assert agent.runtime.current.api_version == NEWEST


def test_auto_keeps_the_version_when_imds_refuses_all(tmp_path: Path) -> None:
    with Simulator() as imds:
        imds.fault("status", 404, times=1000)

        with watching(tmp_path, endpoint=imds.endpoint) as (agent, _):
            eventually(lambda: agent.snapshot.poll.failure == "not_found")

            assert agent.runtime.current.api_version == NEWEST


def test_poll_after_a_timeout_waits_for_a_slow_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polling, "TIMEOUT", 0.3)
    monkeypatch.setattr(polling, "FIRST_TIMEOUT", 5.0)
    get = ImdsClient.get
    timeouts: list[float] = []  # of the polls

    def noting_get(client: ImdsClient, path: str, *, timeout: float) -> ImdsAnswer:
        if "scheduledevents" in path:
            timeouts.append(timeout)
        return get(client, path, timeout=timeout)

    monkeypatch.setattr(ImdsClient, "get", noting_get)
    with Simulator() as imds, watching(tmp_path, endpoint=imds.endpoint) as (agent, _):
        eventually(lambda: agent.snapshot.poll.answered)

        imds.fault("slow", 0.8, times=1000)

        eventually(lambda: agent.snapshot.poll.took > 0.7)

        wait_for_polls(imds, 3)

        # three times as long as the last answer took, which was longer still on a busy machine
        assert min(timeouts[-3:]) > 3 * 0.7


@contextmanager
def watching(directory: Path, **settings: str) -> Iterator[tuple[Tracking, polling.PollThread]]:
    """Poll as an agent with these settings of IMDS; yield its state and the thread that polls."""
    options = {"imds.interval": "200ms"}
    for name, value in settings.items():
        options[f"imds.{name}"] = value
    agent = Tracking(directory, Clock(), load(None, {}, options))
    agent.tracker.use(agent.config.imds.endpoint, agent.runtime.current.api_version)
    watcher = polling.PollThread(agent.runtime, agent.tracker, agent.clock, ThreadGuard())
    watcher.start()
    try:
        yield agent, watcher
    finally:
        watcher.stop()
        agent.close()


def test_endpoint_of_the_search_is_kept_until_it_is_silent_for_long(
    silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polling, "TIMEOUT", PATIENCE)  # no poll fails on a busy machine
    monkeypatch.setattr(polling, "SILENCE", 1.0)
    monkeypatch.setattr(polling, "SEARCH_PAUSE", 0.5)
    with Simulator(vms=("first",)) as imds, Simulator(vms=("second",)) as other:
        monkeypatch.setenv("SCHEDULEDEVENTSIP", imds.endpoint)
        with watching(tmp_path, endpoint=silent) as (agent, _):
            eventually(lambda: agent.snapshot.vm_name == "first" and agent.snapshot.poll.answered)

            monkeypatch.setenv("SCHEDULEDEVENTSIP", other.endpoint)
            wait_for_polls(imds, 10)  # two seconds of polls

            assert agent.runtime.current.endpoint == imds.endpoint

            imds.fault("status", times=1000)
            eventually(lambda: agent.runtime.current.endpoint == other.endpoint)
            eventually(lambda: agent.snapshot.vm_name == "second")


def test_late_imds_is_not_searched_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = Mock()
    monkeypatch.setattr(elsewhere, "candidates", search)
    monkeypatch.setattr(polling, "FIRST_SILENCE", PATIENCE)  # on a busy machine too
    with Simulator(vms=("late",)) as imds:
        use_as_usual_address(imds.endpoint, monkeypatch)
        imds.fault("status", times=2)
        with watching(tmp_path, endpoint=imds.endpoint) as (agent, watcher):
            eventually(lambda: agent.snapshot.vm is not None and agent.snapshot.poll.answered)

            assert watcher.trouble == ""
            assert search.call_count == 0


def test_silent_places_leave_no_hanging_thread(
    silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    places = [("configuration", silent), ("lease", "http://a")] * 2
    overdue: list[float] = []  # for each place, without the time that this place took

    def time_out_slowly(_endpoint: str, _version: str) -> str:
        started = time.monotonic()
        time.sleep(1.0)
        overdue.append(watcher.overdue - (time.monotonic() - started))
        return "timeout"

    caplog.set_level(logging.INFO, "notbefore")
    monkeypatch.setattr(elsewhere, "candidates", lambda: places)
    monkeypatch.setattr(elsewhere, "why_not", time_out_slowly)
    with watching(tmp_path, endpoint=silent) as (_, watcher):
        monkeypatch.setattr(polling, "FIRST_SILENCE", 0.5)
        eventually(lambda: len(overdue) >= 4)

    assert max(overdue) < 0.9
    assert "is IMDS at http://a (lease)? timeout" in caplog.messages


def test_stopped_polling_publishes_no_endpoint(
    silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_searching = threading.Event()
    may_answer = threading.Event()

    def find_imds_late(_endpoint: str, _version: str) -> str:
        is_searching.set()
        may_answer.wait(PATIENCE)
        return ""

    monkeypatch.setattr(polling, "FIRST_SILENCE", 0.2)
    monkeypatch.setattr(elsewhere, "candidates", lambda: [("lease", "http://127.0.0.1:9")])
    monkeypatch.setattr(elsewhere, "why_not", find_imds_late)
    with watching(tmp_path, endpoint=silent) as (agent, watcher):
        assert is_searching.wait(PATIENCE)

        watcher.stop()
        may_answer.set()

        eventually(lambda: watcher.trouble)

    assert agent.runtime.current.endpoint == silent


def test_machine_that_is_no_azure_vm_is_reported_once(
    silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    places = Mock(return_value=[("configuration", silent)])
    for name in ("FIRST_SILENCE", "SEARCH_PAUSE"):
        monkeypatch.setattr(polling, name, 0.2)
    monkeypatch.setattr(elsewhere, "candidates", places)

    with watching(tmp_path, endpoint=silent):
        eventually(lambda: places.call_count > 2)

    assert caplog.text.count("this does not look like an Azure VM") == 1
