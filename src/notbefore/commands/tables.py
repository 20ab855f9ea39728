"""What ``notbefore events`` and ``notbefore history`` show: tables for people, JSON for scripts."""

import sqlite3
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TextIO
from urllib.parse import quote

import msgspec

from notbefore.commands.client import AgentClient
from notbefore.core.duration import span
from notbefore.core.record import json_line
from notbefore.errors import ConfigError, StoreError
from notbefore.store.history import read_history
from notbefore.store.state import FILE_NAME

_PREFIX: Final = "azure.scheduled_event."


def ask(agent: str | AgentClient, path: str) -> dict[str, Any]:
    """GET JSON from a running agent; raises ``NotBeforeError`` saying what to do when none answers."""
    return (AgentClient(agent) if isinstance(agent, str) else agent).ask(path)


def read_changes(
    agent: str | AgentClient, state_dir: str | None, since: str | None, limit: int
) -> list[dict[str, Any]]:
    """The last changes, from a running agent or from a state directory; raises ``NotBeforeError``."""
    if state_dir is None:
        query = f"?limit={limit}" + (f"&since={quote(since)}" if since else "")
        answer = ask(agent, f"/api/v1/history{query}")
        if answer.get("cut"):
            sys.stderr.write("There are older ones, too many for one answer: --state-dir reads them all.\n")
        changes: list[dict[str, Any]] = answer["changes"]
        return changes
    path = Path(state_dir) / FILE_NAME
    try:
        start = _time(since).timestamp() if since else None
        return [msgspec.json.decode(row) for row in read_history(path, start, limit).records]
    except ValueError:
        raise ConfigError(f"--since: expected RFC 3339, got {since!r}") from None
    except sqlite3.Error as error:
        raise StoreError(f"{path} cannot be read: {error}") from None


def show_events(answer: dict[str, Any], out: TextIO, *, as_json: bool) -> None:
    """What is listed now."""
    events = answer["events"]
    if as_json:
        _json(events, out)
        return
    unreadable = answer.get("unreadable", 0)
    if unreadable:
        out.write(f"{unreadable} listed events cannot be read: the agent's log says why.\n")
    elif not events:
        out.write("Nothing is scheduled.\n")
    rows = [_event_row(event) for event in events]
    head = ("TYPE", "STATUS", "SCOPE", "NOT BEFORE", "IN", "EXPECTED", "SOURCE", "RESOURCES", "EVENT ID")
    table(head, rows, out)
    approvals = [(event["event_id"], approval_words(event["approval"])) for event in events if event.get("approval")]
    if approvals:
        out.write("\n")
        table(("EVENT ID", "APPROVAL"), approvals, out)


def approval_words(approval: dict[str, Any]) -> str:
    """What the rules would do with an event, and why."""
    by = f" by {approval['rule']}" if approval["rule"] else ""
    what = f"{approval['action']}{by}: {approval['reason']}"
    if approval["at"]:
        what += f", from {approval['at']} on"
    if approval["mode"] != "on" and approval["action"] == "approve":
        what += f"; but nothing is sent: {approval['off'] or 'approval.dry_run is true'}"
    return what + (f" [{approval['state']}]" if approval["state"] else "")


def _event_row(event: dict[str, Any]) -> tuple[str, ...]:
    return (
        event["event_type"],
        event["event_status"],
        event["scope"],
        event["not_before"] or "-",
        span(event["seconds_to_not_before"]),
        span(event["expected_duration_seconds"]),
        event["event_source"] or "-",
        ", ".join(event["resources"]),
        event["event_id"],
    )


def show_history(changes: Sequence[dict[str, Any]], out: TextIO, *, as_json: bool) -> None:
    """The last changes, oldest first."""
    if as_json:
        _json(changes, out)
        return
    if not changes:
        out.write("No change has been seen.\n")

    def row(change: dict[str, Any]) -> tuple[str, ...]:
        get = {key.removeprefix(_PREFIX): value for key, value in change.items()}.get
        spans = (span(get(f"{name}_seconds")) for name in ("notice", "scheduled", "started", "interruption"))
        return (
            change["time"],
            str(get("change")),
            str(get("outcome") or _approval_cell(get) or "-"),
            str(get("type")),
            str(get("scope")),
            *spans,
            str(get("id")),
        )

    # one kind of change in one column: how it ended, or why and by which rule
    head = ("TIME", "CHANGE", "OUTCOME", "TYPE", "SCOPE", "NOTICE", "SCHEDULED", "STARTED", "INTERRUPTION", "EVENT ID")
    table(head, [row(change) for change in changes], out)


def _approval_cell(get: Callable[[str], Any]) -> str:
    rule, by = get("approval.rule"), get("approval.by")
    return f"{get('reason')}, {rule}" + (f" {by}" if by != "rule" else "") if rule else ""


def _json(items: Iterable[object], out: TextIO) -> None:
    out.writelines(json_line(item).decode() + "\n" for item in items)


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], out: TextIO) -> None:
    """Columns for people; without rows, nothing."""
    if not rows:
        return
    # a name may hold anything: it is shown as JSON would escape it, so that it cannot move the cursor
    cells = [head, *(tuple(json_line(cell).decode()[1:-1] for cell in row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    out.writelines(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n" for row in cells
    )


def _time(text: str) -> datetime:
    time = datetime.fromisoformat(text)
    return time if time.tzinfo else time.replace(tzinfo=UTC)
