"""The section ``messages``: what the messages of all sinks say beside the change."""

from typing import Final

from msgspec import Struct

from notbefore.config.forms import check_address_form

MAX_ADVICE: Final = 2_000  # characters
NO_TZDATA: Final = "install the Debian package `tzdata`, or the Python package: pip install tzdata"


class Links(Struct, frozen=True, forbid_unknown_fields=True):
    """Where a message leads. `{vm}` stands for the name of the VM that sends it, `{event_type}` for Azure's type."""

    dashboard: str | None = None
    runbook: str | None = None
    page: str | None = None  # of the agent, such as https://{vm}.example.org:10169/

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            url = getattr(self, name)
            if url is not None:
                check_address_form(url.replace("{vm}", "vm").replace("{event_type}", "Reboot"), name)


class Messages(Struct, frozen=True, forbid_unknown_fields=True):
    """What the messages of all sinks say beside the change."""

    time_zone: str | None = None  # such as Europe/Berlin: its time stands beside UTC
    advice: dict[str, str] = {}  # what to do, by event type: Reboot: text. Instead of the built-in text
    links: Links = Links()

    def __post_init__(self) -> None:
        if self.time_zone is not None:
            _check_time_zone(self.time_zone)
        for event_type, text in self.advice.items():
            if len(text) > MAX_ADVICE:
                raise ValueError(f"advice.{event_type}: expected {MAX_ADVICE} characters or less")


def _check_time_zone(name: str) -> None:
    import zoneinfo  # noqa: PLC0415 - only who has a time zone needs it

    try:
        zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):  # OSError: the name of a directory
        known = zoneinfo.available_timezones()
        why = "expected a name such as Europe/Berlin" if known else f"this system knows no time zones: {NO_TZDATA}"
        raise ValueError(f"time_zone: {why}, got {name!r}") from None
