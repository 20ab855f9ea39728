"""Nothing false is reported, whatever happens to clocks, machine, disk, process and IMDS.

``Tracker`` and the real store are driven through a world (``support.world``) whose account of the
truth shares no code with them. NOTBEFORE_WORLDS=2000 looks at so many worlds, found by chance.
"""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.observing import Observer, disable_disk_timeouts
from support.world import World

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108 - as quick as it can be


class Machine(RuleBasedStateMachine):
    """One world; each rule is something that may happen."""

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed: int) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="notbefore-truth-", dir=MEMORY))
        self.observer = Observer(self.directory, seed)
        self.patch = pytest.MonkeyPatch()
        disable_disk_timeouts(self.patch)
        self.observer.poll()

    def teardown(self) -> None:
        if hasattr(self, "observer"):
            self.observer.kill()
            self.patch.undo()
            shutil.rmtree(self.directory)

    @property
    def world(self) -> World:
        return self.observer.world

    @rule()
    def azure_announces(self) -> None:
        self.world.announce()

    @rule()
    def azure_changes_its_mind(self) -> None:
        self.world.change()

    @rule(count=st.integers(1, 20))
    def seconds_go_by(self, count: int) -> None:
        self.observer.seconds(count)

    @rule(seconds=st.sampled_from([60, 300, 900]))
    def minutes_go_by(self, seconds: int) -> None:
        self.observer.seconds(seconds)

    @rule(seconds=st.sampled_from([2, 3, 5, 8, 12, 14, 30, 300]))
    def imds_gives_no_answer(self, seconds: int) -> None:
        self.observer.seconds(min(seconds, 5), answers=False)
        self.world.run(max(0, seconds - 5))
        self.observer.seconds(1)

    @rule(dated=st.booleans())
    def imds_sends_a_date_or_not(self, *, dated: bool) -> None:
        self.world.dated = dated
        self.observer.account.perturb()

    @rule(
        how=st.sampled_from(["status", "id", "resources", "not_before"]), seconds=st.integers(1, 20)
    )
    def something_cannot_be_read(self, how: str, seconds: int) -> None:
        for _ in range(seconds):
            self.world.run(1.0)
            self.observer.poll_spoilt(how)

    @rule(
        seconds=st.sampled_from(
            [-86_400.0, -3600.0, -20.0, 1.0, 2.0, 3.0, 20.0, 3600.0, 63_072_000.0]
        )
    )
    def the_wall_clock_is_set(self, seconds: float) -> None:
        self.world.wall_offset += seconds
        self.observer.account.perturb()

    @rule()
    def the_wall_clock_is_put_right(self) -> None:
        self.world.wall_offset = 0.0
        self.observer.account.perturb()

    @rule(seconds=st.sampled_from([0.5, 5.0, 14.0, 60.0, 900.0]), right=st.booleans())
    def the_host_pauses_the_vm(self, seconds: float, *, right: bool) -> None:
        # no agent can notice a pause that neither a clock of the VM nor a Date shows
        self.world.pause(seconds, put_right=right or not self.world.dated)
        self.observer.account.perturb()

    @rule(seconds=st.sampled_from([5.0, 10.0]), failures=st.integers(0, 2))
    def an_event_starts_early_and_pauses_the_vm(self, seconds: float, failures: int) -> None:
        self.world.announce()
        self.observer.seconds(1)
        self.world.start_early(seconds)
        self.observer.account.perturb()
        for _ in range(failures):
            self.observer.fail()
        self.observer.seconds(60)

    @rule(
        seconds=st.sampled_from([0.5, 5.0, 14.0, 300.0, 90_000.0]),
        named=st.booleans(),
        in_order=st.booleans(),
    )
    def the_agent_is_restarted(self, seconds: float, *, named: bool, in_order: bool) -> None:
        self.end_agent(in_order=in_order)
        self.world.run(seconds)
        self.observer.start(named=named)
        self.observer.seconds(1)

    @rule(when=st.sampled_from(["before", "after"]))
    def the_agent_is_killed_at_its_next_commit(self, when: str) -> None:
        self.observer.store.die = when

    @precondition(lambda self: self.observer.tracker is None)
    @rule(named=st.booleans())
    def a_dead_agent_is_started_again(self, *, named: bool) -> None:
        self.world.run(2.0)
        self.observer.start(named=named or self.observer.unknown_disk)
        self.observer.seconds(1)

    @rule(
        seconds=st.sampled_from([20.0, 120.0, 4000.0]),
        vm=st.sampled_from(["a", "a", "a", "b", "c"]),
        named=st.booleans(),
        in_order=st.booleans(),
        due=st.booleans(),
    )
    def the_machine_boots(
        self, seconds: float, vm: str, *, named: bool, in_order: bool, due: bool
    ) -> None:
        if due:  # Azure reboots a VM at NotBefore
            self.run_until_the_next_start()
        self.end_agent(in_order=in_order)
        if vm != self.world.vm:
            self.observer.account.move(vm)
            self.observer.unknown_disk = True
        self.world.reboot(seconds, vm)
        self.observer.account.perturb(rebooted=True)
        self.observer.start(named=named)
        self.observer.seconds(self.world.chance.randint(1, 8))
        if self.observer.unknown_disk:
            # the agent cannot notice another VM that IMDS does not name within ten seconds
            self.observer.learn_name()

    def end_agent(self, *, in_order: bool) -> None:
        if in_order:
            self.observer.stop()
        else:
            self.observer.kill()

    def run_until_the_next_start(self) -> None:
        """Let the time pass until the next event starts. The agent polls in the last seconds."""
        now = self.world.now
        starts = [
            happening.starts_at
            for happening in self.world.happenings.values()
            if happening.listed and happening.starts_at and happening.starts_at > now
        ]
        if starts:
            self.world.run(max(0.0, min(starts) - now - 2.0))
        self.observer.seconds(2)

    @rule()
    def imds_says_which_vm_this_is(self) -> None:
        self.observer.learn_name()

    @invariant()
    def nothing_false_was_reported(self) -> None:
        if hasattr(self, "observer"):
            assert self.observer.account.false == []

    @invariant()
    def what_was_certain_was_not_called_unknown(self) -> None:
        if hasattr(self, "observer"):
            assert self.observer.account.uncertain == []


# 0: a few worlds, the same ones in each run
WORLDS = int(os.environ.get("NOTBEFORE_WORLDS", "0"))
TestTruth = pytest.mark.long(Machine.TestCase)
TestTruth.settings = settings(
    max_examples=WORLDS or 40,
    derandomize=not WORLDS,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
