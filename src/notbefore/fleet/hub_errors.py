"""Why the hub or the checkpoint store fails, and what the user can do about it: the SDK's errors in words. Pure."""

import re
from typing import Final

from notbefore.config.fleet import FleetConfig

MAX_CAUSE: Final = 300  # characters of what the SDK says
_TWICE: Final = re.compile(r" Error(?: condition)?: ")  # from here on the SDK says it again
_KNOWN: Final = (
    (
        re.compile("consumergroups/.*(not-found|could not be found)", re.IGNORECASE),
        (
            "the hub has no consumer group {}: see `fleet.consumer_group`, or make it with"
            " `az eventhubs eventhub consumer-group create`"
        ),
    ),
    (
        re.compile(r"Status code: 404\b|not-found|could not be found", re.IGNORECASE),
        "there is no such hub: see `fleet.hub`",
    ),
    (
        re.compile(r"Status code: 40[13]\b|unauthorized-access"),
        (
            "the hub refuses the key or the identity: a key needs Listen on this hub or namespace, an identity the role"
            " Azure Event Hubs Data Receiver on the hub"
        ),
    ),
)


def explained(error: BaseException, config: FleetConfig) -> str:
    """One line on an error of the hub: what to do where that is known, and what the SDK said."""
    if isinstance(error, TimeoutError):
        return f"no answer in {config.hub.timeout}: see its address, port 5671 (`websockets`: 443), the identity"
    said = " ".join(str(error).split())
    cause = f"{type(error).__name__}: {_TWICE.split(said)[0]}"[:MAX_CAUSE]
    words = next((words.format(config.consumer_group) for known, words in _KNOWN if known.search(said)), "")
    return f"{words} ({cause})" if words else cause


def store_explained(error: BaseException) -> str:
    """One line on an error of the checkpoint store, in the same way."""
    said = f"{type(error).__name__}: {' '.join(str(error).split()) or 'no answer in time'}"[:MAX_CAUSE]
    if getattr(error, "status_code", None) in (401, 403):
        return (
            "the checkpoint store refuses the key or the identity: it needs the role Storage Blob Data Contributor on"
            " the container, and the account's firewall has to let it in"
            f" ({getattr(error, 'error_code', None) or said})"
        )
    if getattr(error, "error_code", "") == "ContainerNotFound":
        return "the container of `fleet.checkpoints` does not exist: make it with `az storage container create`"
    return said
