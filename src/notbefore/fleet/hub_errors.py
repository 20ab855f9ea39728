"""Why the hub or the checkpoint store fails, and what the user can do about it: the SDK's errors in words. Pure."""

import re
from typing import Final

from notbefore.config.fleet import FleetConfig

MAX_CAUSE: Final = 300  # characters of what the SDK says
ROLE: Final = "Azure Event Hubs Data Receiver"
STORE_ROLE: Final = "Storage Blob Data Contributor"
_CODE: Final = re.compile(r"ErrorCode:(\w+)")
_NOT_FOUND: Final = ("not-found", "could not be found")
_GROUP: Final = re.compile("consumergroups/", re.IGNORECASE)
_TWICE: Final = re.compile(r" Error(?: condition)?: ")  # from here on the SDK says it again
_STATUS: Final = re.compile(r"Status code: (\d{3})\b")


def explained(error: BaseException, config: FleetConfig) -> str:
    """One line on an error of the hub: what to do where that is known, and what the SDK said."""
    said = " ".join(str(error).split())
    cause = f"{type(error).__name__}: {_TWICE.split(said)[0]}"[:MAX_CAUSE]
    if isinstance(error, TimeoutError):
        return f"no answer in {config.hub.timeout}: see its address, port 5671 (`websockets`: 443), the identity"
    found = _STATUS.search(said)
    status = found[1] if found is not None else ""
    if status == "404" or any(words in said.casefold() for words in _NOT_FOUND):
        if _GROUP.search(said):
            return (
                f"the hub has no consumer group {config.consumer_group}: see `fleet.consumer_group`, or make it with"
                f" `az eventhubs eventhub consumer-group create` ({cause})"
            )
        return f"there is no such hub: see `fleet.hub` ({cause})"
    if status in ("401", "403") or "unauthorized-access" in said:
        if config.hub.connection_string is not None:
            return f"the hub refuses the key: it has to be a key of this hub or namespace, with Listen ({cause})"
        return f"the hub refuses the identity: it needs the role {ROLE} on the hub ({cause})"
    return cause


def store_explained(error: BaseException) -> str:
    """One line on an error of the checkpoint store, in the same way."""
    said = " ".join(str(error).split()) or "no answer in time"
    if getattr(error, "status_code", None) in (401, 403):
        code = _CODE.search(said)
        return (
            f"the checkpoint store refuses the key or the identity: it needs the role {STORE_ROLE} on the container,"
            f" and the account's firewall has to let it in ({code[1] if code is not None else said[:MAX_CAUSE]})"
        )
    if getattr(error, "error_code", "") == "ContainerNotFound":
        return "the container of `fleet.checkpoints` does not exist: make it with `az storage container create`"
    return f"{type(error).__name__}: {said}"[:MAX_CAUSE]
