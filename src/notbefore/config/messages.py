"""The section ``messages``: what the messages of all sinks say beside the change."""

from typing import Annotated, Final

from msgspec import Struct

from notbefore.config.constraints import Constraint, LinkUrl, at_most

NO_TZDATA: Final = "install the Debian package `tzdata`, or the Python package: pip install tzdata"


def _check_time_zone(name: str) -> None:
    import zoneinfo  # noqa: PLC0415 - only who has a time zone needs it

    try:
        zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):  # OSError: the name of a directory
        known = zoneinfo.available_timezones()
        why = "expected a name such as Europe/Berlin" if known else f"this system knows no time zones: {NO_TZDATA}"
        raise ValueError(f"{why}, got {name!r}") from None


TimeZone = Annotated[str, Constraint(_check_time_zone)]
Advice = Annotated[str, at_most(2_000)]


class Links(Struct, frozen=True, forbid_unknown_fields=True):
    """Where a message leads. `{vm}` stands for the name of the VM that sends it, `{event_type}` for Azure's type."""

    dashboard: LinkUrl | None = None
    runbook: LinkUrl | None = None
    page: LinkUrl | None = None  # of the agent, such as https://{vm}.example.org:10169/


class Messages(Struct, frozen=True, forbid_unknown_fields=True):
    """What the messages of all sinks say beside the change."""

    time_zone: TimeZone | None = None  # such as Europe/Berlin: its time stands beside UTC
    advice: dict[str, Advice] = {}  # what to do, by event type: Reboot: text. Instead of the built-in text
    links: Links = Links()
