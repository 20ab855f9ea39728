"""``judge`` decides whether an event is approved, by which rule, and when. Pure.

An approval lets Azure start an event at once, for all VMs in its ``Resources``. Therefore only the
first matching rule decides, no match means no, and an unknown value (this VM's name, the expected
interruption) never matches.
"""

from collections.abc import Collection, Iterable, Iterator
from datetime import datetime, timedelta
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from notbefore.core.change import (
    BY_RULE,
    OPERATOR,
    Approval,
    ApprovalKind,
    Change,
    Reason,
    change_id,
)
from notbefore.core.clock import Instant
from notbefore.core.document import EVENT_SOURCES, SCHEDULED
from notbefore.core.duration import Duration
from notbefore.core.event_types import EVENT_TYPES, event_type_of, known_name
from notbefore.core.routing import EventMatch
from notbefore.core.text import one_of, sha256
from notbefore.core.tracked import Tracked, TrackedEvent

# finished attempts kept for events that are gone: a list that flaps may show them again
KEPT_ATTEMPTS: Final = 20
MAX_DECISIONS: Final = 100  # remembered decisions per event
# with `for_all_resources: leader`: seconds that a VM waits for the one before it in ``Resources``
SUCCESSION: Final = 30.0
ADVICE: Final = "it is a recommendation: there is nothing that an approval could start"


class RuleMatch(EventMatch, frozen=True, forbid_unknown_fields=True):
    """The events that a rule applies to.

    Events of other VMs match only if ``scope`` contains ``peer``.
    """

    scope: Annotated[tuple[Literal["self", "peer"], ...], Meta(min_length=1)] = ("self",)

    def __post_init__(self) -> None:
        unknown = next(unknown_words(self), None)
        if unknown is not None:
            key, text = unknown
            raise ValueError(f"{key}: {text}")


def unknown_words(match: EventMatch) -> Iterator[tuple[str, str]]:
    """Yield a key and a text for each event type or source that Azure does not document.

    Such a word matches no event today.
    """
    for text in _unknown_among(match.event_type, EVENT_TYPES):
        yield "event_type", text
    for text in _unknown_among(match.event_source, EVENT_SOURCES):
        yield "event_source", text


def _unknown_among(words: Iterable[str], documented: Collection[str]) -> Iterator[str]:
    names = {name.casefold() for name in documented}
    for word in words:
        if word.casefold() not in names:
            yield f"Azure has no {word!r}{one_of(word, documented)}"


class Rule(Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of ``approval.rules``."""

    match: RuleMatch | Literal["all"] = RuleMatch()  # `all`: every event of this VM
    action: Literal["approve", "leave"] = "approve"
    name: str = ""  # in metrics and records; default: `rules[0]` and so on
    approve_after: Duration = Duration("0s")  # wait this long after the event was first seen
    # required for an event with several resources
    for_all_resources: Literal["leader", "each"] | None = None

    def __post_init__(self) -> None:
        if self.action == "leave" and (self.approve_after.seconds or self.for_all_resources):
            raise ValueError("action: leave accepts neither approve_after nor for_all_resources")
        if self.action == "approve" and not self._names_events:
            raise ValueError(
                "match: expected event_type, event_source or duration; `match: all` approves every"
                " event"
            )
        if self.action == "approve":
            self._check_types()
        if self.name == OPERATOR:
            raise ValueError(f"name: {OPERATOR!r} is reserved for approvals by hand")

    def _check_types(self) -> None:
        """Raise ``ValueError`` if the rule names a type that cannot be approved."""
        for word in self.matcher.event_type:
            name = known_name(word)
            if event_type_of(name).is_advice:
                raise ValueError(f"match: no rule approves a {name}: {ADVICE}")

    @property
    def _names_events(self) -> bool:
        """Whether the user wrote which events the rule applies to."""
        if self.match == "all":
            return True
        if self.match.event_type or self.match.event_source:
            return True
        return self.match.duration is not None

    @property
    def matcher(self) -> RuleMatch:
        """The events that the rule applies to."""
        if self.match == "all":
            return RuleMatch()
        return self.match


class Policy(Struct, frozen=True, forbid_unknown_fields=True):
    """Whether the agent approves events, and by which rules."""

    enabled: bool = False  # also needs `notbefore run --allow-approval`
    dry_run: bool = True  # record what would be approved, and send nothing
    # the first one that matches decides; without a match nothing is approved
    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        if len(dict(self.named_rules)) < len(self.rules):
            raise ValueError("rules: two rules have the same name")

    @property
    def named_rules(self) -> list[tuple[str, Rule]]:
        """The rules with their names in metrics and records."""
        named: list[tuple[str, Rule]] = []
        for number, rule in enumerate(self.rules):
            named.append((rule.name or f"rules[{number}]", rule))
        return named


class Decision(Struct, frozen=True):
    """The decision of the rules about one event."""

    action: Literal["approve", "leave"]
    why: str  # in words
    rule: str = ""  # the name of the first rule that matches
    step: str = ""  # identifies the decision: the content of the event and the text of the rule
    at: datetime | None = None  # for ``approve``: the earliest time
    # how many VMs of the event approve it earlier; this VM approves it only if they do not
    predecessors: int = 0
    # for ``leave``: why a matching ``approve`` rule does not approve it
    skipped: Reason | None = None


def content_of(tracked: TrackedEvent) -> str:
    """Return a text that identifies an event and its content, which Azure can change.

    An event that disappears and comes back with the same NotBefore has the same text; without a
    NotBefore, another.
    """
    time = tracked.event.not_before or tracked.first_seen
    return f"{tracked.event.digest()} {time.isoformat()}"


def unreadable(tracked: TrackedEvent, *, flawed: bool) -> str:
    """Return what is unknown about an event, in words, or "".

    Such an event is never approved, not even by hand.
    """
    if flawed:
        return "a part of it could not be read"
    if tracked.event.not_before is None:
        return "it has no NotBefore"
    return ""


def judge(
    policy: Policy, tracked: TrackedEvent, vm: str | None, *, flawed: bool = False
) -> Decision:
    """Return what the rules say about an event on the VM named ``vm``.

    The switches and the time do not matter. ``flawed``: a part of the event could not be read.
    """
    if tracked.event.is_advice:
        return Decision("leave", ADVICE)
    if tracked.event.event_status != SCHEDULED:
        why = f"it is {tracked.event.event_status}: only a Scheduled event can be approved"
        return Decision("leave", why)
    why = unreadable(tracked, flawed=flawed)
    if why:
        return Decision("leave", why)
    if not tracked.event.resources:
        return Decision("leave", "it names no VM: it is not known which VMs an approval affects")

    for name, rule in policy.named_rules:
        if tracked.scope in rule.matcher.scope and rule.matcher.holds(tracked.event):
            return _by_rule(name, rule, tracked, vm)
    return Decision("leave", "no rule matches")


def _by_rule(name: str, rule: Rule, tracked: TrackedEvent, vm: str | None) -> Decision:
    """Return what a rule that matches an event says about it."""
    if rule.action == "leave":
        return Decision("leave", "its action is leave", name)
    rule_digest = sha256(msgspec.json.encode(rule, enc_hook=str))[:16]
    decision = _approve(rule, tracked, vm)
    step = f"{content_of(tracked)} {name} {rule_digest}"
    if decision.predecessors:
        step = f"{step} after {decision.predecessors}"
    return replace(decision, rule=name, step=step)


def _approve(rule: Rule, tracked: TrackedEvent, vm: str | None) -> Decision:
    """Return the decision of a rule with the action ``approve``; the caller adds the rule's name.

    With ``for_all_resources: leader``, the first VM of ``Resources`` leads. Each other VM approves
    ``SUCCESSION`` seconds after the VM before it should have approved.
    """
    vms = list(dict.fromkeys(tracked.event.vms))
    predecessors = 0
    if len(vms) > 1:
        if rule.for_all_resources is None:
            why = f"it affects {len(vms)} VMs, and the rule has no for_all_resources"
            return Decision("leave", why, skipped="several_resources")
        if rule.for_all_resources == "leader":
            if vm is None or vm.casefold() not in vms:
                return Decision("leave", "one of its VMs decides for all of them")
            predecessors = vms.index(vm.casefold())

    wait = rule.approve_after.seconds + predecessors * SUCCESSION
    first_seen = tracked.seen.time
    not_before = tracked.event.not_before
    is_too_late = not_before is not None and wait >= (not_before - first_seen).total_seconds()
    if is_too_late and predecessors:
        return Decision("leave", "NotBefore comes before the turn of this VM")
    if is_too_late:
        return Decision("leave", "NotBefore comes first", skipped="too_late")

    why = "the rule says so"
    if predecessors:
        why = f"this VM is number {predecessors + 1} of {len(vms)}, if none before it approves it"
    at = first_seen + timedelta(seconds=wait)
    return Decision("approve", why, at=at, predecessors=predecessors)


class ApprovalAttempt(Struct, frozen=True):
    """The progress of one event's approval. It is stored, so that nothing is done twice."""

    tracked: TrackedEvent  # the event as it was at the decision
    rule: str
    step: str = ""  # of the decision; empty for approvals by hand
    state: Literal["sending", "done"] = "sending"
    by: str = BY_RULE
    reason: str = ""  # why it is approved, given by the user who approves it by hand
    without_resources: bool = False  # that user approves it even if it names no VM
    requests: int = 0  # start requests, counted before they are sent
    outcome: str = ""  # in words
    carried_out: tuple[str, ...] = ()  # the decisions that were carried out
    approved: str = ""  # the content of the event that was approved
    records: int = 0  # how many records were made of it

    def is_carried_out(self, tracked: TrackedEvent, step: str) -> bool:
        """Whether nothing is left to do for this decision."""
        return step in self.carried_out or self.approved == content_of(tracked)

    def ended(self, outcome: str) -> "ApprovalAttempt":
        """Return the attempt as done, with one more record counted."""
        carried_out = self.carried_out
        if self.step:
            carried_out = (*carried_out, self.step)
        return replace(
            self,
            state="done",
            outcome=outcome,
            carried_out=carried_out,
            records=self.records + 1,
        )

    def change(
        self,
        kind: ApprovalKind,
        reason: Reason,
        detail: str,
        *,
        at: Instant,
        vm: str | None,
        incarnation: int,
    ) -> Change:
        """Return the change to record.

        Its id is that of this ``vm`` alone: no other VM reports the same change.
        """
        tracked = self.tracked
        digest = f"{vm} {tracked.first_seen.isoformat()}"
        identity = change_id(tracked.event.key, kind, digest, self.records)
        change = tracked.change(identity, kind, reason, at, incarnation)
        approval = Approval(
            approval_rule=self.rule,
            approval_by=self.by,
            approval_detail=detail,
            approval_requests=self.requests,
            approval_reason=self.reason,
        )
        return replace(change, approval=approval)


def next_attempt(
    before: ApprovalAttempt | None,
    tracked: TrackedEvent,
    rule: str,
    step: str = "",
    by: str = BY_RULE,
) -> ApprovalAttempt:
    """Return the attempt for a new decision.

    It keeps what the attempt ``before`` did about this event.
    """
    if before is None:
        return ApprovalAttempt(tracked, rule, step, by=by)
    return ApprovalAttempt(
        tracked,
        rule,
        step,
        by=by,
        carried_out=before.carried_out[-MAX_DECISIONS:],
        approved=before.approved,
        records=before.records,
    )


def without_old(
    attempts: dict[str, ApprovalAttempt], tracked: Tracked
) -> dict[str, ApprovalAttempt]:
    """Return the attempts without old ones: done, of events that are gone.

    The newest ``KEPT_ATTEMPTS`` of these are kept.
    """
    done = [key for key, attempt in attempts.items() if attempt.state == "done"]
    done_and_gone = [key for key in done if key not in tracked.events]
    old = set(done_and_gone[:-KEPT_ATTEMPTS])
    return {key: attempt for key, attempt in attempts.items() if key not in old}
