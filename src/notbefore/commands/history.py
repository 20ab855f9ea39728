"""``notbefore history``: show the last changes, from a running agent or from a state directory."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import msgspec

from notbefore.commands.client import AgentClient, add_agent, agent_client
from notbefore.commands.main import FAILED, OK
from notbefore.commands.options import add_json, print_json, table
from notbefore.commands.owner import ask_owner
from notbefore.core.duration import Duration, span
from notbefore.core.record import HISTORY_RECORDS, Record
from notbefore.core.text import escaped, rfc3339, some_of
from notbefore.errors import ConfigError
from notbefore.process.operations import HistoryReply, HistoryRequest
from notbefore.wording.phrases import REASONS
from notbefore.wording.sentences import approval_result

NEWEST: Final = 100  # changes that are shown
NAMES_IN_CHANGE: Final = 3  # of VMs, in a row of the table; `--json` has all of them
HEAD: Final = (
    "TIME",
    "CHANGE",
    "OUTCOME",
    "TYPE",
    "SCOPE",
    "NOTICE",
    "SCHEDULED",
    "STARTED",
    "INTERRUPTION",
    "RESOURCES",
    "EVENT ID",
    "REASON",  # the reason for an ending, or the result of an approval, in words
)


class ShownChanges(NamedTuple):
    """Changes to show, oldest first, as the JSON objects of records."""

    changes: list[dict[str, Any]]
    was_cut: bool  # older ones were left out
    problem: str  # why changes are missing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the agent or the state directory, the start time, and ``--json``."""
    add_agent(parser)
    add_json(parser)
    parser.add_argument(
        "--state-dir", metavar="DIR", help="read this state directory instead of asking an agent"
    )
    parser.add_argument(
        "--since",
        metavar="TIME",
        help=(
            "show the changes from this time on: 1h (an hour ago), or 2026-03-01T12:00:00Z; by"
            f" default, the last {NEWEST}"
        ),
    )


def run(options: argparse.Namespace) -> int:
    """Print the changes, oldest first; return the exit code. Raises ``NotBeforeError``."""
    since: datetime | None = None
    limit = NEWEST
    if options.since:
        since = start_time(options.since, datetime.now(UTC))
        limit = HISTORY_RECORDS
    if options.state_dir is None:
        history = _ask_agent(agent_client(options), since, limit)
    else:
        history = _read_directory(Path(options.state_dir), since, limit)

    if history.was_cut:
        sys.stderr.write("Older changes are left out: one answer cannot hold them.\n")
    if options.json:
        print_json(history.changes)
    elif history.changes or not history.problem:
        show_history(history.changes)
    if history.problem:
        sys.stderr.write(
            "notbefore: changes are missing here: the agent cannot read its state file now"
            f" ({escaped(history.problem)}). Try again.\n"
        )
        return FAILED
    return OK


def _ask_agent(client: AgentClient, since: datetime | None, limit: int) -> ShownChanges:
    path = f"/api/v1/history?limit={limit}"
    if since is not None:
        path += f"&since={quote(rfc3339(since))}"
    answer = client.ask(path)
    return ShownChanges(
        answer["changes"],
        was_cut=answer.get("cut", False),
        problem=answer.get("problem", ""),
    )


def _read_directory(directory: Path, since: datetime | None, limit: int) -> ShownChanges:
    start = None
    if since is not None:
        start = since.timestamp()
    reply = ask_owner(directory, HistoryRequest(start, limit), HistoryReply)
    changes = [msgspec.json.decode(bytes(record)) for record in reply.records]
    return ShownChanges(changes, was_cut=reply.cut, problem=reply.problem)


def start_time(text: str, now: datetime) -> datetime:
    """Return the time of ``--since``; raises ``ConfigError``."""
    with suppress(ValueError, OverflowError):
        return now - timedelta(seconds=Duration(text).seconds)
    try:
        time = datetime.fromisoformat(text)
        if time.tzinfo is None:
            return time.replace(tzinfo=UTC)
        return time.astimezone(UTC)
    except (ValueError, OverflowError):  # OverflowError: before the year 1, or after 9999
        raise ConfigError(
            "--since: expected an age (30m, 1h, 2d) or a time such as 2026-03-01T12:00:00Z, got"
            f" {text!r}"
        ) from None


def show_history(changes: Sequence[dict[str, Any]]) -> None:
    """Print a table of changes, which are the JSON objects of records."""
    if not changes:
        sys.stdout.write("No change has been seen.\n")
    table(HEAD, [_row(msgspec.convert(change, Record)) for change in changes])


def _row(change: Record) -> tuple[str, ...]:
    measured = (
        change.notice_seconds,
        change.scheduled_seconds,
        change.started_seconds,
        change.interruption_seconds,
    )
    return (
        rfc3339(change.time),
        change.change,
        change.outcome or "-",
        change.event_type,
        change.scope,
        *map(span, measured),
        some_of(change.resources, NAMES_IN_CHANGE),
        change.event_id,
        approval_result(change) or REASONS.get(change.reason, ""),
    )
