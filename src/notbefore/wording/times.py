"""Times in messages: in UTC, and in the user's time zone. Pure, but for the zone's data."""

from datetime import UTC, datetime, tzinfo
from zoneinfo import ZoneInfo


def zone_named(name: str | None) -> tzinfo | None:
    """Return a time zone; ``None`` without a name, or if this machine does not know it.

    The configuration was checked, but its zone may be removed later. A message must still be sent.
    """
    if name is None:
        return None
    try:
        return ZoneInfo(name)
    except (ValueError, OSError, KeyError):  # KeyError: the zone is not known
        return None


def clock(time: datetime, zone: tzinfo | None = None) -> str:
    """Return a time as text, in UTC and also in a zone.

    ``2026-03-01 12:15:00 UTC``, or ``2026-03-01 13:15:00 CET (12:15:00 UTC)``.
    """
    utc = time.astimezone(UTC)
    date_and_time = f"{utc:%Y-%m-%d %H:%M:%S} UTC"
    if zone is None:
        return date_and_time
    try:
        local = time.astimezone(zone)
    except OverflowError:  # beyond the years 1 and 9999
        return date_and_time

    if local.tzname() == "UTC":
        return date_and_time
    if local.date() == utc.date():
        return f"{local:%Y-%m-%d %H:%M:%S %Z} ({utc:%H:%M:%S} UTC)"
    return f"{local:%Y-%m-%d %H:%M:%S %Z} ({date_and_time})"
