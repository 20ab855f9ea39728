"""The section ``messages``: what the messages of all sinks say beside the change."""

from typing import Annotated

from msgspec import Struct

from notbefore.config.constraints import LinkUrl, matching

Advice = Annotated[str, matching(r"[\s\S]{0,2000}", "a text of 2000 characters or less")]


class Links(Struct, frozen=True, forbid_unknown_fields=True):
    """Where a message leads. `{vm}` stands for the name of the VM that sends it, `{event_type}` for Azure's type."""

    dashboard: LinkUrl | None = None
    runbook: LinkUrl | None = None
    page: LinkUrl | None = None  # of the agent, such as https://{vm}.example.org:10169/


class Messages(Struct, frozen=True, forbid_unknown_fields=True):
    """What the messages of all sinks say beside the change."""

    advice: dict[str, Advice] = {}  # what to do, by event type: Reboot: text. Instead of the built-in text
    links: Links = Links()
