"""The calendar of coming events: an iCalendar feed (RFC 5545). Pure."""

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

from notbefore.core.text import one_line, some_of
from notbefore.fleet.shown_waves import ShownWave

NAMES_IN_ENTRY: Final = 20  # of VMs

# up to 74 octets, by RFC 5545; the octet after them begins a character
PART_OF_LINE: Final = re.compile(rb".{1,74}(?![\x80-\xbf])")


def calendar(waves: Iterable[ShownWave], now: datetime) -> bytes:
    """Return the feed, with an entry for each wave with events to come, at its NotBefore."""
    lines = ["BEGIN:VCALENDAR", "VERSION:2.0", "PRODID:-//notbefore//fleet//EN"]
    for wave in waves:
        if wave.to_come and wave.not_before is not None:
            lines += _entry(wave, wave.not_before, now)
    lines.append("END:VCALENDAR")
    return b"".join(_folded(line) + b"\r\n" for line in lines)


def _entry(wave: ShownWave, not_before: datetime, now: datetime) -> list[str]:
    vms = f"{len(wave.vms_to_come)} VMs"
    if len(wave.vms_to_come) == 1:
        vms = "1 VM"

    summary = f"{wave.event_type} of {vms}"
    if wave.group:
        summary += f" in {wave.group}"
    summary += ", not before this time"

    description = [f"VMs: {some_of(wave.vms_to_come, NAMES_IN_ENTRY)}"]
    for name, value in wave.tags.items():
        description.append(f"{name}: {value}")
    if wave.description:
        description.append(wave.description)

    return [
        "BEGIN:VEVENT",
        f"UID:{_escaped(wave.event_id)}@notbefore",
        f"DTSTAMP:{_time(now)}",
        f"DTSTART:{_time(not_before)}",
        f"SUMMARY:{_escaped(summary)}",
        "DESCRIPTION:" + "\\n".join(_escaped(line) for line in description),
        "END:VEVENT",
    ]


def _time(time: datetime) -> str:
    return f"{time.astimezone(UTC):%Y%m%dT%H%M%SZ}"


def _escaped(text: str) -> str:
    return re.sub(r"([\\;,])", r"\\\1", one_line(text))


def _folded(line: str) -> bytes:
    """Fold a long line: it continues on the next line after a space; no character is cut."""
    return b"\r\n ".join(PART_OF_LINE.findall(line.encode()))
