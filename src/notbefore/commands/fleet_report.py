"""``notbefore fleet report``: show how Azure treated the fleet, from the instances' histories."""

import argparse
import csv
import socket
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import quote, urlsplit

import msgspec
from msgspec.structs import replace

from notbefore.commands.client import AgentClient, add_agent, agent_client
from notbefore.commands.history import start_time
from notbefore.commands.options import add_json, print_json, table
from notbefore.core.duration import span
from notbefore.core.text import one_of
from notbefore.errors import ConfigError, NotBeforeError
from notbefore.fleet.history import COLUMNS, FIGURES, USUAL, read_past, report

IN_TABLE: Final = (
    "events",
    "vms",
    "notice_min",
    "notice_median",
    "notice_max",
    "short_notice",
    "interruption_min",
    "interruption_median",
    "interruption_max",
    "finished",
    "canceled",
    "unknown",
    "as_far_as_known",
)
LEGEND: Final = """\
Notice and interruption are per affected VM; short notice: less than nine tenths of the promise.
As far as known: not every VM has reported the end of these events.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the instances, the start time, the columns, and the form of the output.

    Each instance knows only the events of its partitions. So ``--url`` may name several instances,
    separated by commas, and all addresses of a host name are asked.
    """
    add_agent(parser)
    parser.add_argument(
        "--since",
        default="90d",
        metavar="TIME",
        help="90d (90 days ago, the default), or 2026-03-01T00:00:00Z",
    )
    parser.add_argument(
        "--by",
        default=",".join(USUAL),
        metavar="COLUMNS",
        help=f"group by {', '.join(COLUMNS)}, tags.NAME",
    )
    add_json(parser, "JSON, one object per row")
    parser.add_argument("--csv", action="store_true", help="print CSV, one line per row")


def run(options: argparse.Namespace) -> int:
    """Print the report; returns the exit code. Raises ``NotBeforeError``."""
    since = start_time(options.since, datetime.now(UTC))
    by = tuple(options.by.split(","))
    for name in by:
        if name not in COLUMNS and name.removeprefix("tags.") in ("", name):
            raise ConfigError(f"--by: there is no {name!r}{one_of(name, (*COLUMNS, 'tags.NAME'))}")
    options.url, *others = (options.url or "").split(",")
    options.url = options.url or None
    first = agent_client(options)
    asked = [first, *(replace(first, url=url, own_cert_file=None) for url in others)]
    path = f"/api/v1/fleet/history?since={quote(since.isoformat())}"
    found = [
        event for client in asked for one in _instances(client) for event in _events(one, path)
    ]
    rows = report(read_past(map(msgspec.json.encode, found)), by)
    if options.json:
        print_json(rows)
    elif options.csv:
        writer = csv.DictWriter(sys.stdout, dict.fromkeys((*by, *FIGURES)), lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _inert(value) for name, value in row.items()} for row in rows)
    else:
        sys.stdout.write(
            f"Events that ended since {since:%Y-%m-%d %H:%M} UTC, without exercises.\n"
        )
        columns = (*by, *IN_TABLE)
        head = tuple(name.removeprefix("event_").replace("_", " ").upper() for name in columns)
        table(head, [tuple(_cell(row[name]) for name in columns) for row in rows])
        sys.stdout.write(LEGEND if rows else "None.\n")
    return 0


def _instances(client: AgentClient) -> Iterator[AgentClient]:
    """The instances at an address: one for each address of the host name.

    ``localhost`` is one, at any of its own.
    """
    try:
        address = urlsplit(client.url)
        name, port = (
            address.hostname,
            address.port or {"http": 80, "https": 443}.get(address.scheme),
        )
        known = name and port and name != "localhost"
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM) if known else []
    except OSError as error:
        raise NotBeforeError(
            f"{client.url}: the name cannot be resolved ({error.strerror or error})"
        ) from None
    except ValueError:
        found = []  # the client says what is expected
    if not found:
        yield client
    for host in dict.fromkeys(str(one[4][0]) for one in found):
        named = f"[{host}]" if ":" in host else host
        yield replace(client, url=f"{address.scheme}://{named}:{port}{address.path}", name=name)


def _events(client: AgentClient, path: str) -> list[Any]:
    """Ask an instance for its past events.

    Raises a ``NotBeforeError`` also if its answer has none.
    """
    found = client.ask(path).get("events")
    if not isinstance(found, list):
        raise NotBeforeError(
            f"{client.url}: the answer has no list `events`: is it an instance of `notbefore"
            " fleet`?"
        )
    return found


def _inert(value: object) -> object:
    """The value of a cell of CSV.

    A text that a spreadsheet would evaluate gets a ' in front, as OWASP advises.
    """
    return (
        f"'{value}"
        if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
        else value
    )


def _cell(value: float | str | None) -> str:
    """The text of a cell; floats are seconds."""
    return span(value) if isinstance(value, float) else "-" if value in (None, "") else str(value)
