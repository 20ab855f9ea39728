"""What is planned, as an iCalendar feed (RFC 5545). Pure."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

from notbefore.core.text import one_line, some_of
from notbefore.fleet.shown_waves import ShownWave

MAX_LINE: Final = 75  # octets, by the standard
MAX_NAMES: Final = 20


def calendar(waves: Iterable[ShownWave], now: datetime) -> bytes:
    """An event of the calendar for each wave that is still to come, at its NotBefore."""
    lines = ["BEGIN:VCALENDAR", "VERSION:2.0", "PRODID:-//notbefore//fleet//EN"]
    for one in waves:
        if not one.to_come or one.not_before is None:
            continue
        place = one.scale_set or one.resource_group
        where = f" in {place}" if place else ""
        about = [f"VMs: {some_of(one.vms, MAX_NAMES)}", *(f"{name}: {value}" for name, value in one.tags.items())]
        lines += [
            "BEGIN:VEVENT",
            f"UID:{_escaped(one.event_id)}@notbefore",
            f"DTSTAMP:{_time(now)}",
            f"DTSTART:{_time(one.not_before)}",
            f"SUMMARY:{_escaped(f'{one.event_type} of {len(one.vms)} VMs{where}, not before this time')}",
            "DESCRIPTION:" + "\\n".join(map(_escaped, filter(None, [*about, one.description]))),
            "END:VEVENT",
        ]
    return "".join(f"{_folded(line)}\r\n" for line in [*lines, "END:VCALENDAR"]).encode()


def _time(time: datetime) -> str:
    return f"{time.astimezone(UTC):%Y%m%dT%H%M%SZ}"


def _escaped(text: str) -> str:
    text = one_line(text).replace("\\", "\\\\")
    return text.replace(";", "\\;").replace(",", "\\,")


def _folded(line: str) -> str:
    """A long line goes on in the next one after a space; no character is cut."""
    parts, part = list[str](), ""
    for character in line:
        if len((part + character).encode()) > MAX_LINE - 1:
            parts.append(part)
            part = ""
        part += character
    return "\r\n ".join([*parts, part])
