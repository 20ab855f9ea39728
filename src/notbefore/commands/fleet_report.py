"""``notbefore fleet report``: show how Azure treated the fleet, from the instances' histories."""

import argparse
import csv
import socket
import sys
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
from notbefore.fleet.history import read_past
from notbefore.fleet.history_report import COLUMNS, FIGURES, USUAL, Row, report

DEFAULT_PORTS: Final = {"http": 80, "https": 443}
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
WITH_AZURE: Final = ("azure_notice_median", "azure_short_notice", "known_by_azure", "known_by_vms")
"""Further columns of the table, if Azure itself has reported an event."""
SEVERAL: Final = "--url may name several instances, separated by commas."
LEGEND: Final = """\
Notice and interruption are per affected VM; short notice: less than nine tenths of the promise.
As far as known: not every VM has reported the end of these events.
"""
AZURE_LEGEND: Final = """\
Azure notice: per event, from the arrival of Azure's first message to NotBefore.
Known by: Azure, or the VMs, have reported how the event ended.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the instances, the start time, the columns, and the form of the output.

    Each instance knows only the events of its partitions. So ``--url`` may name several instances,
    separated by commas, and the command asks all addresses of a host name.
    """
    parser.description = f"{parser.description} {SEVERAL}"
    add_agent(parser, "the instance")
    parser.add_argument(
        "--since",
        default="90d",
        metavar="TIME",
        help="count events from this time on: 90d (90 days ago, the default), or"
        " 2026-03-01T00:00:00Z",
    )
    parser.add_argument(
        "--by",
        default=",".join(USUAL),
        metavar="COLUMNS",
        help=f"group by these: {', '.join(COLUMNS)}, tags.NAME (default {','.join(USUAL)})",
    )
    add_json(parser, "print JSON, one object per row")
    parser.add_argument("--csv", action="store_true", help="print CSV, one line per row")


def run(options: argparse.Namespace) -> int:
    """Print the report; return the exit code. Raises ``NotBeforeError``."""
    since = start_time(options.since, datetime.now(UTC))
    by = _columns(options.by)
    events: list[Any] = []
    for client in _clients(options):
        for instance in _instances(client):
            events += _past_events(instance, since)
    rows = report(read_past(msgspec.json.encode(event) for event in events), by)

    if options.json:
        print_json(rows)
    elif options.csv:
        _print_csv(rows, by)
    else:
        _print_table(rows, by, since)
    return 0


def _columns(text: str) -> tuple[str, ...]:
    """Return the columns of ``--by``; raises ``ConfigError``."""
    columns = tuple(text.split(","))
    for name in columns:
        is_tag = name.startswith("tags.") and name != "tags."
        if name not in COLUMNS and not is_tag:
            raise ConfigError(f"--by: there is no {name!r}{one_of(name, (*COLUMNS, 'tags.NAME'))}")
    return columns


def _clients(options: argparse.Namespace) -> list[AgentClient]:
    """Return a client for each address of ``--url``, or for that of the configuration."""
    options.url = options.url or None
    client = agent_client(options)
    return [replace(client, url=url) for url in client.url.split(",")]


def _instances(client: AgentClient) -> list[AgentClient]:
    """Return a client for each address of the host name.

    ``localhost`` is one instance, although it may have two addresses.
    """
    try:
        url = urlsplit(client.url)
        name = url.hostname
        port = url.port or DEFAULT_PORTS.get(url.scheme)
        if not name or not port or name == "localhost":
            return [client]
        resolved = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise NotBeforeError(
            f"{client.url}: the name cannot be resolved ({error.strerror or error}): check --url"
        ) from None
    except ValueError:
        return [client]  # which raises an error that says what is expected

    instances: dict[str, AgentClient] = {}
    for _family, _type, _protocol, _name, socket_address in resolved:
        address = str(socket_address[0])
        host = address
        if ":" in address:
            host = f"[{address}]"
        address_url = f"{url.scheme}://{host}:{port}{url.path}"
        instances[address] = replace(client, url=address_url, name=name)
    return list(instances.values())


def _past_events(instance: AgentClient, since: datetime) -> list[Any]:
    """Ask an instance for its past events. Raises ``NotBeforeError``."""
    reply = instance.ask(f"/api/v1/fleet/history?since={quote(since.isoformat())}")
    events = reply.get("events")
    if not isinstance(events, list):
        raise NotBeforeError(
            f"{instance.url}: the answer has no list `events`: is it an instance of `notbefore"
            " fleet`?"
        )
    return events


def _print_csv(rows: list[Row], by: tuple[str, ...]) -> None:
    columns = dict.fromkeys((*by, *FIGURES))  # each once, in this order
    writer = csv.DictWriter(sys.stdout, columns, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: _inert(value) for name, value in row.items()})


def _print_table(rows: list[Row], by: tuple[str, ...], since: datetime) -> None:
    sys.stdout.write(f"Events that ended since {since:%Y-%m-%d %H:%M} UTC, without exercises.\n")
    columns = (*by, *IN_TABLE)
    has_azure = any(row["azure_notice"] or row["known_by_azure"] for row in rows)
    if has_azure:
        columns += WITH_AZURE
    head = tuple(name.removeprefix("event_").replace("_", " ").upper() for name in columns)
    table(head, [tuple(_cell(row[name]) for name in columns) for row in rows])
    if not rows:
        sys.stdout.write("None.\n")
        return
    sys.stdout.write(LEGEND)
    if has_azure:
        sys.stdout.write(AZURE_LEGEND)


def _inert(value: object) -> object:
    """Return the value of a cell of CSV.

    A text that a spreadsheet would evaluate gets a ' in front, as OWASP advises.
    """
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return f"'{value}"
    return value


def _cell(value: float | str | None) -> str:
    """Return the text of a cell; floats are seconds."""
    if isinstance(value, float):
        return span(value)
    if value is None or value == "":
        return "-"
    return str(value)
