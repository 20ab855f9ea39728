"""The supervisor keeps a courier: it copes with couriers that cannot start, hang, die or are of
another version.
"""

import fcntl
import os
import select
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import notbefore
from notbefore.config.model import Config, FleetConfig, Log
from notbefore.config.secret import Secret
from notbefore.config.sinks import Command, EventHub, Messages, SinkConfig, Webhook
from notbefore.core.delivery import Delivery, Targets
from notbefore.core.duration import Duration
from notbefore.core.outbox import SendResult
from notbefore.core.routing import Terms
from notbefore.courier import supervisor, upgrade
from notbefore.courier.courier_process import CourierProcess, environment
from notbefore.courier.orders import Hello, Orders
from notbefore.courier.supervisor import Supervisor, make_orders
from notbefore.metrics.totals import CourierFigures
from notbefore.store import SCHEMA_VERSION
from support.agent import PATIENCE, courier_of, eventually, has_ended
from support.owner import RECORD, Owner, serve
from support.peers import Answer, HttpPeer

Start = Callable[..., Supervisor]


@pytest.fixture(autouse=True)
def _a_slow_courier_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, a courier or the test may do nothing for seconds."""
    monkeypatch.setattr(supervisor, "LINGER", 10 * PATIENCE)
    monkeypatch.setattr(supervisor, "OVERDUE", PATIENCE)
    monkeypatch.setattr(upgrade, "CHECK_SECONDS", PATIENCE)


def never(_seconds: float) -> bool:
    """Let a stop take as long as it needs."""
    return False


def at_once(_seconds: float) -> bool:
    """Interrupt a stop when it first asks."""
    return True


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
def start(owner: Owner) -> Iterator[Start]:
    """Return a function that makes supervisors. They are stopped after the test."""
    supervisors: list[Supervisor] = []

    def make(orders: Orders, outbox: Owner = owner, **options: Any) -> Supervisor:
        couriers = Supervisor(orders, outbox, **options)
        supervisors.append(couriers)
        return couriers

    yield make
    for couriers in supervisors:
        couriers.stop(at_once)


def sinks(**scripts: str) -> dict[str, SinkConfig]:
    """Return sinks that run shell scripts, by name."""
    return {
        name: SinkConfig(command=Command(command=("/bin/sh", "-c", script)))
        for name, script in scripts.items()
    }


def deliver(couriers: Supervisor, owner: Owner, delivery_id: str) -> None:
    """Add a delivery to the sink ``hook``, and wait until it has left the outbox."""
    owner.add(delivery_id, sink="hook")
    serve([couriers], lambda: not owner.rows)


def starts(**counts: int) -> dict[str, int]:
    """Return the starts of couriers by reason. Reasons that are not named have none."""
    return CourierFigures().starts | counts


@pytest.mark.alone
def test_courier_delivers_whenever_it_is_woken(tmp_path: Path, owner: Owner, start: Start) -> None:
    output = tmp_path / "output"
    couriers = start(Orders(sinks(hook=f"cat >> {output}")))
    deliver(couriers, owner, "a")

    seconds: list[float] = []
    for delivery_id in "bcdefg":
        started = time.monotonic()
        deliver(couriers, owner, delivery_id)
        seconds.append(time.monotonic() - started)

    # no delivery has waited for the courier's turn, which comes each second
    assert statistics.median(seconds) < 0.5
    assert output.read_bytes() == 7 * (RECORD + b"\n")
    assert couriers.trouble == ""


def test_busy_agent_reads_several_turns_at_once(owner: Owner, start: Start) -> None:
    couriers = start(Orders(sinks(hook="true")))
    deliver(couriers, owner, "a")
    owner.add("b", sink="hook")
    couriers.tick()
    (channel,) = couriers.watched[0]
    select.select([channel], [], [], PATIENCE)
    with socket.socket(fileno=os.dup(channel.fileno())) as end:
        eventually(lambda: end.recv(4096, socket.MSG_PEEK).count(b"limits") > 1)

    serve([couriers], lambda: not owner.rows)

    assert couriers.figures == CourierFigures(running=True, starts=starts(due=1))


def test_stop_ends_the_courier(owner: Owner) -> None:
    couriers = Supervisor(Orders(sinks(hook="true")), owner)
    deliver(couriers, owner, "a")

    couriers.stop(never)

    assert not couriers.figures.running
    assert owner.endings == 1
    assert couriers.trouble == ""


def test_due_deliveries_are_sent_before_the_agent_stops(
    tmp_path: Path, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "STOP_SECONDS", PATIENCE)
    output = tmp_path / "output"
    couriers = Supervisor(Orders(sinks(hook=f"sleep 0.3; echo >> {output}")), owner)
    owner.add("a", "b", "c", sink="hook")
    couriers.tick()

    couriers.stop(lambda seconds: seconds > 0.0)  # interrupt only when no time is left

    assert owner.left == {}
    assert output.read_text() == "\n\n\n"


def test_courier_starts_shortly_before_a_delivery_is_due(owner: Owner, start: Start) -> None:
    couriers = start(Orders())
    owner.add("later", due=time.time() + 3_600.0)

    couriers.tick()

    assert not couriers.figures.running
    assert 3_600.0 - PATIENCE < couriers.patience < 3_600.0

    owner.ahead = 3_599.5
    couriers.tick()

    assert couriers.figures.running


def test_stopped_courier_is_not_watched(owner: Owner) -> None:
    couriers = Supervisor(Orders(), owner)
    owner.add("a")
    couriers.tick()

    couriers.stop(at_once)

    assert couriers.watched == ([], [])


def test_idle_courier_ends(owner: Owner, monkeypatch: pytest.MonkeyPatch, start: Start) -> None:
    couriers = start(Orders(sinks(hook="true")))
    deliver(couriers, owner, "a")

    with monkeypatch.context() as patched:
        patched.setattr(supervisor, "LINGER", 0.5)
        serve([couriers], lambda: not couriers.figures.running)

    assert owner.left == {}
    assert couriers.figures.starts == starts(due=1)

    deliver(couriers, owner, "b")

    assert couriers.figures.starts == starts(due=2)


def test_reload_replaces_the_courier(tmp_path: Path, owner: Owner, start: Start) -> None:
    output = tmp_path / "output"
    couriers = start(Orders(sinks(hook=f"echo old >> {output}")))
    deliver(couriers, owner, "a")

    couriers.reconfigure(Orders(sinks(hook=f"echo new >> {output}")))
    deliver(couriers, owner, "b")

    assert output.read_text() == "old\nnew\n"
    assert couriers.figures.starts == starts(due=1, reload=1)


class WaitingCommand:
    """A command that runs until the test releases it."""

    def __init__(self, directory: Path) -> None:
        self._log = directory / "log"
        self._released = directory / "released"
        begin = f"echo begin $NOTBEFORE_DELIVERY_ID >> {self._log}"
        wait = f"while [ ! -e {self._released} ]; do sleep 0.05; done"
        end = f"echo end $NOTBEFORE_DELIVERY_ID >> {self._log}"
        self.script = f"{begin}; {wait}; {end}"

    @property
    def log(self) -> list[str]:
        if not self._log.exists():
            return []
        return self._log.read_text(encoding="utf-8").splitlines()

    def release(self) -> None:
        self._released.touch()


def test_reload_serves_other_sinks_while_a_command_runs(
    tmp_path: Path, owner: Owner, start: Start
) -> None:
    command = WaitingCommand(tmp_path)
    orders = Orders(sinks(run=command.script, hook="true"))
    couriers = start(orders)
    owner.add("drain", sink="run", once=True)
    serve([couriers], lambda: command.log == ["begin drain"])

    couriers.reconfigure(orders)
    owner.add("notice", sink="hook")
    serve([couriers], lambda: "notice" not in owner.left)

    assert command.log == ["begin drain"]
    assert owner.endings == 0
    assert couriers.figures.starts == starts(due=1, reload=1)

    command.release()
    serve([couriers], lambda: owner.endings == 1)

    assert owner.left == {}
    assert command.log == ["begin drain", "end drain"]
    assert couriers.figures.running


def test_reload_keeps_commands_of_one_event_in_order(
    tmp_path: Path, owner: Owner, start: Start
) -> None:
    command = WaitingCommand(tmp_path)
    orders = Orders(sinks(run=command.script))
    couriers = start(orders)
    owner.add("announced", "started", sink="run", event="freeze", once=True)
    serve([couriers], lambda: command.log)

    couriers.reconfigure(orders)
    owner.add("other", sink="run", once=True)
    serve([couriers], lambda: len(command.log) == 2)
    command.release()
    serve([couriers], lambda: not owner.left)

    log = command.log
    assert log[:2] == ["begin announced", "begin other"]
    assert log.index("end announced") < log.index("begin started")


def test_failed_delivery_of_a_removed_sink_moves_while_a_command_runs(
    tmp_path: Path, owner: Owner, start: Start
) -> None:
    command = WaitingCommand(tmp_path)
    fails = f"while [ ! -e {tmp_path}/fails ]; do sleep 0.05; done; exit 75"
    couriers = start(Orders(sinks(run=command.script, removed=fails)))
    owner.add("drain", sink="run", once=True)
    owner.add("notice", sink="removed")
    serve([couriers], lambda: len(owner.leased) == 2)

    owner.use_sinks({"run": Terms(), "hook": Terms()}, lambda _delivery: Targets(("hook",)))
    couriers.reconfigure(Orders(sinks(run=command.script, hook="true")))
    (tmp_path / "fails").touch()
    serve([couriers], lambda: list(owner.left) == ["drain"])
    log_before_release = command.log
    command.release()
    serve([couriers], lambda: not owner.left)

    assert log_before_release == ["begin drain"]
    assert owner.leased[-1].sink == "hook"


def test_killed_courier_loses_only_its_own_command(
    tmp_path: Path, owner: Owner, start: Start
) -> None:
    command = WaitingCommand(tmp_path)
    orders = Orders(sinks(run=command.script))
    couriers = start(orders)
    owner.add("first", sink="run", once=True)
    serve([couriers], lambda: command.log == ["begin first"])
    leaving = courier_of(os.getpid())
    couriers.reconfigure(orders)
    owner.add("second", sink="run", once=True)
    serve([couriers], lambda: len(command.log) == 2)

    os.kill(leaving, signal.SIGKILL)
    serve([couriers], lambda: owner.endings)
    states_after_kill = dict(owner.left)
    command.release()
    serve([couriers], lambda: "second" not in owner.left)

    assert states_after_kill == {"first": "dead", "second": "pending"}
    assert [delivery.delivery_id for delivery in owner.leased] == ["first", "second"]


def test_reloads_while_commands_run_start_few_couriers(
    tmp_path: Path, owner: Owner, start: Start
) -> None:
    command = WaitingCommand(tmp_path)
    orders = Orders(sinks(run=command.script, hook="true"))
    couriers = start(orders)
    for number in range(supervisor.MOST_COURIERS):
        owner.add(f"drain-{number}", sink="run", once=True)
        serve([couriers], lambda: len(command.log) == number + 1)
        couriers.reconfigure(orders)

    owner.add("notice", sink="hook")
    some_ticks_later = time.monotonic() + 2.0
    serve([couriers], lambda: time.monotonic() > some_ticks_later)
    notice_waited = "notice" in owner.left
    command.release()
    serve([couriers], lambda: not owner.left)

    assert notice_waited
    assert sum(couriers.figures.starts.values()) == supervisor.MOST_COURIERS + 1


def test_courier_does_not_end_while_a_receiver_is_slow(
    owner: Owner, monkeypatch: pytest.MonkeyPatch, start: Start
) -> None:
    class Slow(HttpPeer):
        def answer(self, handler: Any, answer: Answer) -> None:
            time.sleep(2.0)  # longer than a turn
            super().answer(handler, answer)

    with Slow() as peer:
        monkeypatch.setenv("HOOK", peer.url)
        hook = Webhook(url=Secret("HOOK", "env"), allow_private=True, timeout=Duration("60s"))
        couriers = start(Orders({"hook": SinkConfig(webhook=hook)}))
        owner.add("a", sink="hook")
        serve([couriers], lambda: owner.leased)
        monkeypatch.setattr(supervisor, "LINGER", 0.2)

        serve([couriers], lambda: not owner.rows)

        assert len(peer.requests) == 1


# ---- trouble


def test_failed_start_of_a_courier_is_repeated_after_growing_pauses(
    tmp_path: Path,
    owner: Owner,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    couriers = start(Orders())
    owner.add("a")

    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", str(tmp_path / "no-python"))
        now = time.monotonic() - 60.0
        pauses: list[float] = []
        patched.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: now))
        for _ in range(5):
            couriers.tick()
            pauses.append(couriers.patience)
            now += couriers.patience

    assert pauses == pytest.approx([0.0, 1.0, 2.0, 4.0, 8.0])
    assert couriers.trouble.startswith("the courier cannot be started (")
    assert couriers.trouble in caplog.messages
    assert couriers.figures == CourierFigures()

    serve([couriers], lambda: couriers.figures.running and not couriers.trouble)


def test_dead_courier_is_replaced_and_its_deliveries_are_due_again(
    owner: Owner, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    couriers = start(Orders(sinks(hook="sleep 60", well="true")))
    owner.add("a", sink="hook")
    owner.add("b", sink="well")
    serve([couriers], lambda: owner.results)

    for number in range(1, 4):
        serve([couriers], lambda: len(owner.leased) == 1 + number)
        os.kill(courier_of(os.getpid()), signal.SIGKILL)
        serve([couriers], lambda: owner.endings == number)
    serve([couriers], lambda: len(owner.leased) == 5)

    ended = "the courier ended unexpectedly (exit code -9) while sending to hook"
    assert f"{ended}: another is started" in caplog.messages
    assert couriers.figures.starts == starts(due=1, crashed=3)


def test_first_dead_courier_is_replaced_at_once(owner: Owner, start: Start) -> None:
    couriers = start(Orders(sinks(hook="sleep 60")))
    owner.add("a", sink="hook")
    serve([couriers], lambda: owner.leased)

    os.kill(courier_of(os.getpid()), signal.SIGKILL)
    serve([couriers], lambda: owner.endings)

    assert couriers.figures.running
    assert couriers.trouble == ""


def test_delivery_that_may_run_once_is_dead_when_its_courier_dies(
    owner: Owner, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    couriers = start(Orders(sinks(hook="sleep 60")))
    owner.add("a", sink="hook", once=True)
    serve([couriers], lambda: owner.leased)

    os.kill(courier_of(os.getpid()), signal.SIGKILL)
    serve([couriers], lambda: owner.endings)

    (row,) = owner.rows
    assert row.state == "dead"
    assert row.error.partition(":")[0] == "interrupted"
    assert f"sink hook: `announced` of event e-a: {row.error}" in caplog.messages


def test_hanging_courier_is_killed_and_replaced(
    owner: Owner, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "notbefore")
    couriers = start(Orders(sinks(hook="sleep 60")))
    owner.add("a", sink="hook")
    serve([couriers], lambda: owner.leased)
    hanging = courier_of(os.getpid())
    os.kill(hanging, signal.SIGSTOP)

    with monkeypatch.context() as patched:
        patched.setattr(supervisor, "OVERDUE", 2)
        serve([couriers], lambda: couriers.figures.starts.get("hung"))

    eventually(lambda: has_ended(hanging))
    assert f"courier {hanging} started: due" in caplog.messages
    assert "the courier has sent nothing for 2 s: it is killed and replaced" in caplog.messages

    serve([couriers], lambda: len(owner.leased) == 2)


def test_courier_that_reads_nothing_does_not_block_the_agent(start: Start) -> None:
    class Stopping(Owner):
        def exchange(
            self, results: Iterable[SendResult], limits: Mapping[str, int]
        ) -> Sequence[Delivery]:
            if limits and not self.leased:
                os.kill(courier_of(os.getpid()), signal.SIGSTOP)
            return super().exchange(results, limits)

    owner = Stopping()
    names = [f"hook-{number}" for number in range(20)]
    couriers = start(Orders(sinks(**dict.fromkeys(names, "true"))), owner)
    for name in names:
        owner.add(name, sink=name, record=RECORD + b" " * 90_000)
    serve([couriers], lambda: owner.leased)

    seconds: list[float] = []
    for _ in range(50):
        started = time.monotonic()
        couriers.tick()
        seconds.append(time.monotonic() - started)

    assert statistics.median(seconds) < 0.1
    assert couriers.watched[1]  # bytes wait until the courier reads

    os.kill(courier_of(os.getpid()), signal.SIGCONT)
    serve([couriers], lambda: not owner.rows)


def test_stopped_courier_ends_with_its_agent(tmp_path: Path) -> None:
    agent = """
import os, signal, sys, time
from notbefore.courier.courier_process import CourierProcess, environment
from notbefore.courier.orders import Orders, seal
lock = os.open(sys.argv[1], os.O_RDONLY)
courier = CourierProcess(seal(Orders(), {}), environment(Orders()), lock)
frames = 0
while frames < 2:  # its hello, and its first turn: from then on it ends with this process
    frames += len(list(courier.received()))
    time.sleep(0.01)
os.kill(courier.pid, signal.SIGSTOP)
print(courier.pid, flush=True)
time.sleep(60)
"""

    command = [sys.executable, "-c", agent, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        courier = int(process.stdout.readline())
        process.kill()

    eventually(lambda: has_ended(courier))


def locked(directory: Path) -> int:
    """Lock a directory, or raise ``BlockingIOError``; return the descriptor of the lock."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    return descriptor


def is_free(directory: Path) -> bool:
    """Return whether no process has locked a directory."""
    try:
        os.close(locked(directory))
    except BlockingIOError:
        return False
    return True


def test_commands_do_not_inherit_the_lock_of_the_agent(
    tmp_path: Path, owner: Owner, start: Start
) -> None:
    lock = locked(tmp_path)
    files = tmp_path / "files"
    script = f"ls -l /proc/self/fd > {files}.new; mv {files}.new {files}"
    couriers = start(Orders(sinks(hook=script)), lock=SimpleNamespace(descriptor=lock))
    owner.add("a", sink="hook")

    serve([couriers], files.exists)

    assert f"-> {tmp_path}\n" not in files.read_text()

    os.close(lock)


def test_courier_holds_the_lock_of_its_agent_until_it_ends(
    tmp_path: Path, owner: Owner, start: Start
) -> None:
    lock = locked(tmp_path)
    couriers = start(Orders(sinks(hook="sleep 60")), lock=SimpleNamespace(descriptor=lock))
    owner.add("a", sink="hook")
    serve([couriers], lambda: owner.leased)
    courier = courier_of(os.getpid())

    os.close(lock)  # as when the agent ends

    with pytest.raises(BlockingIOError):
        locked(tmp_path)

    os.kill(courier, signal.SIGKILL)
    eventually(lambda: is_free(tmp_path))


def test_courier_gets_the_settings_that_it_needs() -> None:
    hook = sinks(hook="true")
    messages = Messages(advice={"Reboot": "Run."})
    fleet = FleetConfig(EventHub(connection_string=Secret("TOKEN", "env")))

    orders = make_orders(
        Config(sinks=hook, messages=messages, fleet=fleet, log=Log("json", "debug"))
    )

    assert orders == Orders(
        sinks=hook, messages=messages, log_format="json", log_level="debug", hidden=("TOKEN",)
    )


@pytest.mark.parametrize(
    "name",
    [
        "OTEL_EXPORTER_OTLP_HEADERS",
        "OTEL_EXPORTER_OTLP_METRICS_HEADERS",
        "NOTBEFORE_X__Y",
        "TOKEN",
    ],
)
def test_courier_gets_no_secret_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "x")

    variables = environment(Orders(hidden=("TOKEN",)))

    assert name not in variables


def test_courier_gets_the_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "x")

    variables = environment(Orders())

    assert variables["HTTPS_PROXY"] == "x"


# ---- another package


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the package from which couriers start. A test may install another one there."""
    site = tmp_path / "site"
    site.mkdir()
    root = Path(notbefore.__file__).parent
    (site / "notbefore").symlink_to(root)
    monkeypatch.setattr(notbefore, "__file__", str(site / "notbefore" / "__init__.py"))
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setattr(sys, "argv", ["__main__.py"])  # started by `python -m notbefore`
    return site / "notbefore"


def install_another(package: Path, check: str = "", init: str = "", courier: str = "") -> None:
    """Install another package.

    ``check`` is the program that answers for `notbefore check-config`, ``init`` the text of the
    package itself, ``courier`` the program of its courier.
    """
    directory = package.with_name(f"notbefore-{time.monotonic_ns()}")
    (directory / "courier").mkdir(parents=True)
    (directory / "__init__.py").write_text(init, encoding="utf-8")
    (directory / "__main__.py").write_text(check, encoding="utf-8")
    (directory / "courier" / "__init__.py").write_text("", encoding="utf-8")
    (directory / "courier" / "__main__.py").write_text(courier, encoding="utf-8")
    package.unlink(missing_ok=True)
    package.symlink_to(directory)


HELLO = """
import os, socket, struct, time, msgspec
end = socket.socket(fileno=os.dup(0))
end.recv(1)
frame = msgspec.msgpack.encode({hello})
end.sendall(struct.pack("!I", len(frame)) + frame)
time.sleep(60)  # until it is killed
"""


def courier_that_says(version: str = "99.0", schema: object = 99) -> str:
    """Return the program of a courier that sends this hello, and waits until it is killed."""
    hello = {"version": version, "schema": schema, "new": "field"}
    return HELLO.replace("{hello}", repr(hello))


def test_agent_ends_for_a_version_whose_check_succeeds(
    installed: Path, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = ["--for", "run", "--", "my.yml"]
    couriers = start(Orders(), check_arguments=arguments)
    couriers.tick()
    expected = ["check-config", *arguments]
    check = f"import sys; sys.exit(sys.argv[1:] != {expected})"

    install_another(installed, check, courier=courier_that_says(schema=SCHEMA_VERSION))
    serve([couriers], lambda: couriers.successor)  # though no delivery is due

    assert couriers.successor == "99.0"
    assert couriers.figures.starts["upgrade"] == 1
    assert (
        f"notbefore 99.0 is installed, and works: this one ({notbefore.__version__}) ends for it"
        in caplog.messages
    )


def test_upgrade_waits_for_a_running_command(
    installed: Path, tmp_path: Path, owner: Owner, start: Start
) -> None:
    command = WaitingCommand(tmp_path)
    couriers = start(Orders(sinks(run=command.script)))
    owner.add("drain", sink="run", once=True)
    serve([couriers], lambda: command.log)

    install_another(installed, courier=courier_that_says())
    leave_time_later = time.monotonic() + supervisor.LEAVE_SECONDS + 1.0
    serve([couriers], lambda: time.monotonic() > leave_time_later)
    successor_meanwhile = couriers.successor
    command.release()
    serve([couriers], lambda: couriers.successor)

    assert successor_meanwhile == ""
    assert command.log == ["begin drain", "end drain"]
    assert owner.left == {}


def test_successor_gets_the_waiting_deliveries(installed: Path, owner: Owner, start: Start) -> None:
    couriers = start(Orders())
    install_another(installed, courier=courier_that_says())
    serve([couriers], lambda: couriers.successor)
    owner.add("a")

    couriers.tick()

    assert not couriers.figures.running
    assert owner.left == {"a": "pending"}


@pytest.mark.parametrize(
    ("check", "why"),
    [
        pytest.param(
            "raise SystemExit('notbefore: sinks.a: no such key')",
            "`notbefore check-config` fails (exit code 1): notbefore: sinks.a: no such key",
            id="refused configuration",
        ),
        pytest.param(
            "import notbefore.not_there_yet",
            "ModuleNotFoundError: No module named 'notbefore.not_there_yet'",
            id="missing module",
        ),
    ],
)
def test_agent_continues_when_the_check_of_another_version_fails(
    installed: Path, start: Start, check: str, why: str
) -> None:
    couriers = start(Orders())

    install_another(installed, check, courier=courier_that_says())
    serve([couriers], lambda: couriers.trouble)

    assert why in couriers.trouble
    assert "notbefore 99.0 is installed, which cannot replace" in couriers.trouble
    assert couriers.successor == ""


def test_agent_ends_for_another_version_whose_check_succeeds_later(
    installed: Path, start: Start
) -> None:
    couriers = start(Orders())
    install_another(installed, "raise SystemExit('incomplete')", courier=courier_that_says())
    serve([couriers], lambda: couriers.trouble)

    install_another(installed, courier=courier_that_says())
    serve([couriers], lambda: couriers.successor)

    assert couriers.successor == "99.0"


def test_agent_continues_when_the_check_of_another_version_hangs(
    installed: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upgrade, "CHECK_SECONDS", 0.5)
    couriers = start(Orders())

    install_another(installed, "import time; time.sleep(600)", courier=courier_that_says())
    serve([couriers], lambda: couriers.trouble)

    assert "`notbefore check-config` took more than" in couriers.trouble
    assert couriers.successor == ""


def test_agent_continues_when_the_installed_version_is_older(installed: Path, start: Start) -> None:
    couriers = start(Orders())

    install_another(installed, courier=courier_that_says(schema=1))
    serve([couriers], lambda: couriers.trouble)

    assert f"it cannot read what {notbefore.__version__} has written" in couriers.trouble
    assert couriers.successor == ""


def test_courier_with_a_wrong_hello_is_replaced(
    installed: Path, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    couriers = start(Orders())

    install_another(installed, courier=courier_that_says(schema="?"))
    serve([couriers], lambda: couriers.trouble)

    assert "the courier does not start (exit code -9)" in couriers.trouble
    assert "the courier sent a wrong message (Expected `int`, got `str`" in caplog.text


def test_package_with_a_reused_inode_is_noticed(installed: Path, start: Start) -> None:
    install_another(installed, courier=courier_that_says())
    couriers = start(Orders())
    couriers.tick()
    replaced_at_start = couriers.replaced
    file = Path(notbefore.__file__)
    inode = file.stat().st_ino

    with file.open("w", encoding="utf-8") as package:
        package.write("__version__ = '99.0'")
    serve([couriers], lambda: couriers.successor)

    assert not replaced_at_start
    assert file.stat().st_ino == inode


def test_courier_waits_for_an_incomplete_installation(
    installed: Path, owner: Owner, start: Start
) -> None:
    couriers = start(Orders())
    this_package = installed.readlink()
    install_another(
        installed, init="__version__ = '99.0'", courier="import notbefore.courier.not_there_yet"
    )
    owner.add("a")

    serve([couriers], lambda: couriers.trouble)

    assert (
        "was replaced or removed: the courier does not start (exit code 1): notifications wait"
        in couriers.trouble
    )
    assert couriers.successor == ""
    assert owner.left == {"a": "pending"}

    installed.unlink()
    installed.symlink_to(this_package)  # the same version again
    serve([couriers], lambda: couriers.figures.running and not couriers.trouble)


@pytest.mark.parametrize("kind", ["command", "telepathy"])
def test_courier_ends_when_its_orders_are_of_another_version(kind: str) -> None:
    orders = {
        "version": "0.0.1",
        "sinks": {"a": {kind: {"command": ["true"]}}},
        "new": "field",
    }

    courier = CourierProcess(msgspec.msgpack.encode(orders), environment(Orders()))
    frame = eventually(lambda: next(iter(courier.received()), b""))

    assert msgspec.msgpack.decode(frame, type=Hello) == Hello(notbefore.__version__, SCHEMA_VERSION)

    os.waitid(os.P_PID, courier.pid, os.WEXITED | os.WNOWAIT)
    assert courier.end() == 0
