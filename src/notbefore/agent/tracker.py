"""``Tracker`` follows the document of IMDS: bytes in, changes out to ``AgentState``.

The polling thread calls ``handle``, the thread that asks who this VM is calls ``identify``.
"""

import logging
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from notbefore.agent.approval_log import without_old
from notbefore.agent.clock import Instant
from notbefore.agent.freeze import FreezeMeter
from notbefore.agent.state import AgentState, PollStatus, name_of
from notbefore.core.change import Change, Gap
from notbefore.core.document import Document, Flaw, parse
from notbefore.core.lifecycle import Observation, diff
from notbefore.core.record import Vm
from notbefore.errors import DocumentError
from notbefore.imds.poller import Poll
from notbefore.metrics.process import PollFigures
from notbefore.metrics.totals import increased
from notbefore.store.state import Store
from notbefore.store.state_file import StoredState

log = logging.getLogger("notbefore.agent.tracker")


class Tracker:
    """What is known of the present document, and how it was watched."""

    def __init__(self, state: AgentState, store: Store, freeze_meter: FreezeMeter) -> None:
        self._state = state
        self._store = store
        self._clock = clock = state.clock
        self._freeze_meter = freeze_meter
        self._started = clock.now()
        self._document: Document | None = None
        self._rejected: DocumentError | None = None  # why the body that IMDS gives now is no document
        self._logged_vm = state.snapshot.vm

    # ---- what the polling thread calls

    def handle(self, poll: Poll) -> None:
        """Take in one poll: count it, read its document, and commit what it changes."""
        if poll.error is not None:
            self._failed(poll, poll.error.reason, str(poll.error))
            return
        if poll.body is not None:
            self._read(poll.body)
        if poll.time is not None:
            self._store.confirm_time(poll.time)
        if self._rejected is not None:
            self._failed(poll, "rejected", str(self._rejected), self._rejected.reason)
        else:
            self._answered(poll)

    def use_api_version(self, api_version: str) -> None:
        """From now on documents are of this version; what is known is outdated until the first of them has come."""
        status = self._state.snapshot.poll
        figures = replace(status.figures, api_version=api_version)
        self._state.publish(replace(status, figures=figures, outdated=True))

    def _read(self, body: bytes) -> None:
        try:
            self._document = parse(body, self._state.snapshot.poll.figures.api_version)
            self._rejected = None
            _log_flaws(self._document.flaws)
        except DocumentError as error:
            self._rejected = error

    def _failed(self, poll: Poll, reason: str, detail: str, rejection: str | None = None) -> None:
        status = self._state.snapshot.poll
        figures = status.figures.plus(reason, poll.lag, poll.duration)
        if rejection is not None:
            figures = replace(figures, documents_rejected=increased(figures.documents_rejected, rejection))
        if status.failure != reason:
            log.warning("IMDS: %s; asking again, and going on with what is known", detail)
        self._state.publish(replace(status, figures=figures, failure=reason))

    def _answered(self, poll: Poll) -> None:
        snapshot, document, now = self._state.snapshot, self._document, self._clock.read()
        if snapshot.poll.failure is not None:
            log.info("IMDS answers again")
        gap = self._freeze_meter.take() if self._freeze_meter.running else None  # since the last good answer
        result = "changed" if poll.body is not None else "unchanged"
        figures = snapshot.poll.figures.plus(result, poll.lag, poll.duration)
        # while an event of this VM is started, each poll may lengthen the interruption
        if document is None or (poll.body is None and not snapshot.state.tracked.interrupting):
            self._state.publish(PollStatus(figures, now, None, False, snapshot.poll.flaws))  # noqa: FBT003 - not outdated; by position it is cheaper, and this is done each second
            return
        if poll.body is not None:
            figures = _with_flaws(figures, document.flaws)
        status = PollStatus(figures, now, flaws=document.flaws)

        def step(state: StoredState) -> tuple[StoredState, Sequence[Change]] | None:
            made = self._compare(state, document, self._observation(state, now, gap or Gap(poll.lag, poll.lag)))
            # at the first answer this boot is written down, and that the last stop is over: a crash may follow
            return made or ((state, ()) if snapshot.poll.answered is None else None)

        self._state.commit(step, status)

    def _observation(self, state: StoredState, now: Instant, gap: Gap) -> Observation:
        answered = self._state.snapshot.poll.answered
        rebooted = state.boot_id != self._clock.boot_id
        name = name_of(self._state.vm_of(state))
        if answered is not None:
            return Observation(now.wall, name, now.since(answered), rebooted, gap)
        # the first good answer of this process, which measured no gap before it
        silence = max(0.0, (now.wall - state.seen).total_seconds()) if state.seen is not None else None
        return Observation(now.wall, name, silence, rebooted, self._gap_over_boot(state) if rebooted else None)

    def _gap_over_boot(self, state: StoredState) -> Gap | None:
        """From the last beat before the boot to the start of this process, if beats were written down until then."""
        if state.beat is None or not (state.clean or state.tracked.interrupting):
            return None
        return Gap(max(0.0, (self._started - state.beat).total_seconds()), 0.0)

    def _compare(
        self, state: StoredState, document: Document, observation: Observation
    ) -> tuple[StoredState, Sequence[Change]] | None:
        result = diff(state.tracked, document, observation)
        self._freeze_meter.switch(on=result.tracked.expecting)
        if result.tracked == state.tracked and not result.changes:
            return None
        approvals = without_old(state.approvals, result.tracked)
        return replace(state, tracked=result.tracked, approvals=approvals), result.changes

    # ---- what the thread that asks who this VM is calls

    def identify(self, vm: Vm | None) -> None:
        """Take in who this VM is, as IMDS says; ``None``: the configuration may have another name for it.

        What is listed may be this VM's, or another's, now that the name is known.
        """
        others: list[str] = []

        def step(state: StoredState) -> tuple[StoredState, Sequence[Change]] | None:
            identified = replace(state, vm=vm or state.vm)
            made = None
            if self._document is not None and self._state.snapshot.poll.answered is not None:
                name = name_of(self._state.vm_of(identified))
                observation = Observation(self._clock.now(), name, 0.0, rebooted=False)
                made = self._compare(identified, self._document, observation)
            if made is not None:
                before, after = state.tracked.events, made[0].tracked.events
                others.extend(key for key in after if after[key].scope == "peer" != before[key].scope)
            return made or ((identified, ()) if identified.vm != state.vm else None)

        self._state.commit(step)
        self._store.leave(others)  # what was announced as if it might be this VM's is not repeated
        vm = self._state.snapshot.vm
        if vm != self._logged_vm and vm is not None:
            log.info("this VM is %s", vm.name)
            conflict = self._state.snapshot.name_conflict(vm.name)
            if conflict:
                log.warning("%s; nothing is approved while they differ", conflict)
        self._logged_vm = vm


def _with_flaws(figures: PollFigures, flaws: Iterable[Flaw]) -> PollFigures:
    counts = figures.flaws
    for flaw in flaws:
        counts = increased(counts, flaw.reason)
    return replace(figures, flaws=counts)


def _log_flaws(flaws: Iterable[Flaw]) -> None:
    for flaw in flaws:
        which = f"event {flaw.event_id}" if flaw.event_id is not None else "an event without a readable id"
        if flaw.rejected:
            log.warning("%s cannot be read (%s): what was known of it is kept", which, flaw.reason)
        else:
            log.warning("%s cannot be read in full (%s)", which, flaw.reason)
