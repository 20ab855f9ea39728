"""Whether an event is to be approved, by which rule, and when: ``judge(policy, life, vm)``. Pure.

Approving lets Azure start an event at once, for all VMs in its ``Resources``. So the first rule that matches decides
alone, no rule means no, and what is not known (who this VM is, how long it will take) never counts as a match.
"""

from datetime import datetime, timedelta
from typing import Final, Literal

from msgspec import Struct

from notbefore.events.change import Approval, ApprovalKind, Change, Reason, change_id
from notbefore.events.document import SCHEDULED
from notbefore.events.duration import Duration
from notbefore.events.lifecycle import Life
from notbefore.events.routing import RANK_DELAY, EventMatch

OPERATOR: Final = "operator"  # stands for the rule where somebody approves by hand
BY_RULE: Final = "rule"


class Who(EventMatch, frozen=True, forbid_unknown_fields=True):
    """The events that a rule is for; those of other VMs alone only where ``scope`` says so."""

    scope: tuple[Literal["self", "peer"], ...] = ("self",)


class Guard(Struct, frozen=True, forbid_unknown_fields=True):
    """A command that says whether the machine is ready: drained, failed over, checkpointed."""

    command: tuple[str, ...]
    timeout: Duration = Duration("60s")

    def __post_init__(self) -> None:
        if not self.command or not self.command[0]:
            raise ValueError("command: expected a program and its arguments, such as [/usr/local/bin/drained]")


class Rule(Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of ``approval.rules``."""

    match: Who = Who()
    action: Literal["approve", "leave"] = "approve"
    name: str = ""  # in metrics and records; without one its place in the list: `rules[0]`
    approve_after: Duration = Duration("0s")  # from the first sight of the event
    approve_when: Guard | None = None  # it exits with 0: ready. Runs once an event
    for_all_resources: Literal["leader", "each"] | None = None  # needed where the event is not this VM's alone

    def __post_init__(self) -> None:
        if self.action == "leave" and (self.approve_after.seconds or self.approve_when or self.for_all_resources):
            raise ValueError("action: leave has no use for approve_after, approve_when and for_all_resources")
        if self.name == OPERATOR:
            raise ValueError(f"name: {OPERATOR!r} stands for what is approved by hand")


class Policy(Struct, frozen=True, forbid_unknown_fields=True):
    """The section ``approval`` of the configuration."""

    enabled: bool = False  # needs `notbefore run --allow-approval` as well
    dry_run: bool = True  # say what would be approved, and send nothing
    rules: tuple[Rule, ...] = ()  # the first that matches decides; without one an event is left alone

    def __post_init__(self) -> None:
        names = [name for name, _ in self.named_rules]
        if len(set(names)) < len(names):
            raise ValueError("rules: two have the same name")

    @property
    def named_rules(self) -> list[tuple[str, Rule]]:
        """The rules, each with what it is called in metrics and records."""
        return [(rule.name or f"rules[{number}]", rule) for number, rule in enumerate(self.rules)]

    @property
    def approving(self) -> tuple[str, ...]:
        """The names of the rules that may approve."""
        return tuple(name for name, rule in self.named_rules if rule.action == "approve")


class Decision(Struct, frozen=True):
    """What the rules say of one event."""

    action: Literal["approve", "leave"]
    why: str  # in words
    rule: str = ""  # the first that matched
    at: datetime | None = None  # for ``approve``: not before
    guard: Guard | None = None
    skipped: Reason | None = None  # for ``leave``: the rule would approve, and this stands against it
    leads: bool = True  # no other VM is to speak first


def judge(policy: Policy, life: Life, vm: str | None) -> Decision:
    """What the rules say of an event as it is known, on the VM named ``vm``; no switch and no clock is looked at."""
    if life.event.event_status != SCHEDULED:
        return Decision("leave", f"it is {life.event.event_status}: only what is Scheduled can be approved")
    for name, rule in policy.named_rules:
        if life.scope in rule.match.scope and rule.match.holds(life.event, life.notice):
            if rule.action == "leave":
                return Decision("leave", "the rule says so", name)
            return _approve(name, rule, life, vm)
    return Decision("leave", "no rule matches")


def _approve(name: str, rule: Rule, life: Life, vm: str | None) -> Decision:
    names = list(dict.fromkeys(resource.casefold() for resource in life.event.resources))
    rank = 0
    if len(names) > 1:
        if rule.for_all_resources is None:
            why = f"it stands for {len(names)} VMs, and the rule does not say for_all_resources"
            return Decision("leave", why, name, skipped="several_resources")
        if rule.for_all_resources == "leader":
            if vm is None or vm.casefold() not in names:
                return Decision("leave", "one of its resources speaks for all of them", name)
            rank = names.index(vm.casefold())
    at = life.first_seen + timedelta(seconds=rule.approve_after.seconds + rank * RANK_DELAY)
    if life.not_before is not None and at >= life.not_before:
        return Decision("leave", "NotBefore comes first", name, skipped="too_late" if rank == 0 else None)
    return Decision("approve", "the rule says so", name, at=at, guard=rule.approve_when, leads=rank == 0)


class Attempt(Struct, frozen=True):
    """How far the approval of one event has come; kept in the store, so that nothing is done twice."""

    life: Life  # as it was when it was decided
    rule: str
    state: Literal["checking", "sending", "done"] = "checking"
    by: str = BY_RULE
    command: Literal["", "running", "ready", "failed"] = ""  # of `approve_when`: it runs once an event
    said: str = ""  # by the command at last
    requests: int = 0  # start requests, counted before they are sent
    approved: str = ""  # the content that was approved
    told: int = 0  # records made of it

    def settles(self, life: Life, rule: str) -> bool:
        """All is done that this rule asks for this content of the event."""
        digest = life.event.digest()
        if self.approved == digest:
            return True
        return self.state == "done" and self.rule == rule and self.life.event.digest() == digest

    def next(self, life: Life, rule: str, by: str = BY_RULE) -> "Attempt":
        """Decided anew, for other content or under another rule; what the rule's command said holds on."""
        same = rule == self.rule
        command, said = (self.command, self.said) if same else ("", "")
        return Attempt(life, rule, by=by, command=command, said=said, approved=self.approved, told=self.told)

    def change(self, kind: ApprovalKind, reason: Reason, detail: str, where: "Where") -> Change:
        """The record of it. Unlike a step of the event it is this VM's own, and so is its id."""
        life = self.life
        return Change(
            id=change_id(life.event.key, kind, f"{where.vm} {life.first_seen.isoformat()}", self.told),
            kind=kind,
            reason=reason,
            time=where.now,
            event=life.event,
            scope=life.scope,
            incarnation=where.incarnation,
            first_seen=life.first_seen,
            not_before=life.not_before,
            notice_seconds=life.notice,
            approval=Approval(self.rule, self.by, detail, self.requests),
        )


class Where(Struct, frozen=True):
    """When and by whom something was done."""

    now: datetime
    vm: str | None
    incarnation: int
