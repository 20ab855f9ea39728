"""``notbefore fleet report``: how Azure treated the fleet, from the history that the instances have written."""

import argparse
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, TextIO

from notbefore.commands.history import start_time
from notbefore.commands.options import add_json
from notbefore.commands.tables import print_json, table
from notbefore.config.load import load
from notbefore.core.duration import span
from notbefore.core.record import Spread
from notbefore.errors import NotBeforeError
from notbefore.fleet.history import history_directory, read_past
from notbefore.fleet.report import Report, ReportRow

HEAD: Final = (
    "TYPE", "REGION", "EVENTS", "VMS", "NOTICE MIN", "MEDIAN", "MAX", "TOO SHORT",
    "INTERRUPTION MIN", "MEDIAN", "MAX", "FINISHED", "CANCELED", "UNKNOWN",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the history is, from when on, and the form of the answer."""
    parser.add_argument(
        "config", nargs="?", type=Path, metavar="CONFIG", help="the configuration of an instance: it names its history"
    )
    parser.add_argument(
        "--dir",
        dest="directories",
        action="append",
        type=Path,
        default=[],
        metavar="DIR",
        help="a directory of history; for several instances, give it several times",
    )
    parser.add_argument(
        "--since", default="90d", metavar="TIME", help="90d (so long ago, the default), or 2026-03-01T00:00:00Z"
    )
    add_json(parser, "JSON, one object a type and region")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots")


def run(options: argparse.Namespace) -> int:
    """Print the report; returns the exit code. Raises ``NotBeforeError``."""
    until = datetime.now(UTC)
    since = start_time(options.since, until)
    directories = options.directories or [history_directory(load(options.config, os.environ, {}, sending=False))]
    unreadable: list[str] = []
    try:
        for one in directories:
            next(one.iterdir(), None)  # raises where it does not exist, or may not be read
        past = read_past(directories, since, until, unreadable)
    except OSError as error:
        raise NotBeforeError(
            f"{error.filename} cannot be read ({error.strerror}): give CONFIG or --dir, and run this as root or as the"
            " instance's user"
        ) from None
    for text in unreadable[:10]:
        sys.stderr.write(f"notbefore: {text}\n")
    if unreadable:
        sys.stderr.write(f"notbefore: {len(unreadable)} lines cannot be read, and are left out\n")
    report = Report.of(past, since, until)
    if options.html is not None:
        _write_page(report, options.html)
    show(report, sys.stdout, as_json=options.json)
    return 0


def _write_page(report: Report, path: Path) -> None:
    from notbefore.fleet.page import report_page  # noqa: PLC0415 - the template library, for those who want a page

    try:
        path.write_bytes(report_page(report))
    except OSError as error:
        raise NotBeforeError(f"--html: {path} cannot be written: {error.strerror}") from None
    sys.stderr.write(f"{path} is written.\n")


def show(report: Report, out: TextIO, *, as_json: bool) -> None:
    """Print a report: a table for people, or a JSON object a row."""
    if as_json:
        print_json(report.rows, out)
        return
    vms = sum(row.vms for row in report.rows)
    days = (report.until - report.since).total_seconds()
    out.write(f"{len(report.events)} events of {vms} VMs in {span(days)}, since {report.since:%Y-%m-%d %H:%M} UTC.\n")
    if report.exercises:
        out.write(f"{report.exercises} exercises are left out.\n")
    table(HEAD, [_cells(row) for row in report.rows], out)
    guessed = sum(row.as_far_as_known for row in report.rows)
    if guessed:
        out.write(f"{guessed} events are over as far as is known: not every VM said so.\n")
    if report.rows:
        out.write("Notice and interruption are of each affected VM. Too short: less than nine tenths of the promise.\n")


def _cells(row: ReportRow) -> tuple[str, ...]:
    short = "-" if row.short_notice is None else f"{row.short_notice} of {row.measured_notice}"
    return (
        row.event_type,
        row.region or "-",
        str(row.events),
        str(row.vms),
        *_spread(row.notice),
        short,
        *_spread(row.interruption),
        *map(str, (row.finished, row.canceled, row.unknown)),
    )


def _spread(found: Spread | None) -> tuple[str, ...]:
    return tuple(map(span, found or (None, None, None)))
