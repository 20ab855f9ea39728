"""``MaintenanceProvider``: acknowledges a scheduled event at Azure's Maintenance resource provider.

This counts like a start request at IMDS: it lets the event start for all of its ``Resources``.
"""

import re
from contextlib import closing
from typing import Any, Final
from urllib.parse import quote, urlencode

from azure.core.exceptions import AzureError
from msgspec import Struct

from notbefore.config.model import FleetApproval
from notbefore.config.sinks import EventHub
from notbefore.core.change import Reason
from notbefore.core.text import one_line
from notbefore.courier.sinks.event_hub import keep_proxy_from_tokens
from notbefore.errors import NotBeforeError, SendError
from notbefore.fleet.hub_records import Place
from notbefore.net.http import Http
from notbefore.net.response import SUCCESSFUL, HttpResponse

SCOPE: Final = "https://management.azure.com/.default"  # of the token
TIMEOUT: Final = 20.0  # seconds for the request
TOKEN_TIMEOUT: Final = 10.0  # seconds to connect, and to read the answer of the identity endpoint
MAX_WORDS: Final = 300  # characters of an answer or an error in words
NOT_FOUND: Final = 404
CONFLICT: Final = 409
# the names allowed in the path of a request: they come from the hub, so a sender chooses them
_NAME: Final = re.compile(r"(?!\.+$)[\w.()-]{1,256}", re.ASCII)
_RESOURCE: Final = re.compile(
    r"/subscriptions/([^/]+)/resourcegroups/([^/]+)/providers/microsoft\.compute/([^/]+)/([^/]+)",
    re.IGNORECASE,
)


class Target(Struct, frozen=True):
    """The resource that an event belongs to: a VM, a scale set or an availability set."""

    subscription: str
    resource_group: str
    kind: str  # virtualMachines, virtualMachineScaleSets, availabilitySets
    name: str

    def path(self, event_id: str) -> str:
        """Return the path that acknowledges an event. Raises ``NotBeforeError`` for odd names."""
        parts = (self.subscription, self.resource_group, self.kind, self.name, event_id)
        for part in parts:
            if _NAME.fullmatch(part) is None:
                raise NotBeforeError(f"nothing is sent: {part[:100]!r} is no name of Azure's")
        subscription, group, kind, name, event = (quote(part, safe="()") for part in parts)
        return (
            f"/subscriptions/{subscription}/resourcegroups/{group}/providers/Microsoft.Compute"
            f"/{kind}/{name}/providers/Microsoft.Maintenance/scheduledevents/{event}/acknowledge"
        )


def target_of(resource_id: str, place: Place, vms: tuple[str, ...]) -> Target:
    """Return the target of an event. Raises ``NotBeforeError`` if it is not known.

    ``resource_id``: as Azure reports it; empty if only VMs have reported the event.
    """
    match = _RESOURCE.fullmatch(resource_id)
    if match is not None:
        return Target(*match.groups())
    if place.scale_set:
        kind = "virtualMachineScaleSets"
        return Target(place.subscription, place.resource_group, kind, place.scale_set)
    if len(vms) == 1:
        return Target(place.subscription, place.resource_group, "virtualMachines", vms[0])
    raise NotBeforeError(
        "nothing is sent: the event affects several VMs, and only Azure's own messages name their"
        " availability set: approve it on one of the VMs, with `notbefore approve`"
    )


class Acknowledgement(Struct, frozen=True):
    """The result of a request: a reason as in records, and words for people."""

    reason: Reason
    words: str = ""


class MaintenanceProvider:
    """Azure's API for maintenance. ``identity``: the hub's settings, with the identity to use."""

    def __init__(self, settings: FleetApproval, identity: EventHub) -> None:
        self._settings = settings
        self._identity = identity

    def acknowledge(self, target: Target, event_id: str) -> Acknowledgement:
        """Send one request. Raises ``NotBeforeError`` if nothing was sent."""
        query = urlencode({"api-version": self._settings.api_version})
        url = f"{self._settings.endpoint.rstrip('/')}{target.path(event_id)}?{query}"
        headers = {"Authorization": f"Bearer {self._token()}", "Accept": "application/json"}
        with closing(Http(TIMEOUT)) as http:
            try:
                response = http.post(url, headers)
            except SendError as error:
                return Acknowledgement("no_answer", str(error))
        return _read(response)

    def _token(self) -> str:
        """Return an access token. Raises ``NotBeforeError`` without one."""
        try:
            with closing(_make_credential(self._identity)) as credential:
                token: str = credential.get_token(SCOPE).token
        except (AzureError, OSError, ValueError) as error:
            text = one_line(str(error))[:MAX_WORDS]
            raise NotBeforeError(
                "nothing was sent: the identity of `fleet.hub` gets no token; check its `auth` and"
                f" `client_id`: {text}"
            ) from None
        return token


def _read(response: HttpResponse) -> Acknowledgement:
    if response.status in SUCCESSFUL:
        return Acknowledgement("accepted")
    words = f"Azure answered {response.cause[:MAX_WORDS]}"
    if response.status in (NOT_FOUND, CONFLICT):
        return Acknowledgement("changed", f"{words}; look again: `notbefore events --fleet`")
    return Acknowledgement("refused", words)


def _make_credential(identity: EventHub) -> Any:
    """Return the credential of the identity, which the caller must close."""
    keep_proxy_from_tokens()
    # 14 MB, which only an approval needs
    from azure.identity import (  # noqa: PLC0415
        DefaultAzureCredential,
        ManagedIdentityCredential,
    )

    limits: dict[str, Any] = {
        "connection_timeout": TOKEN_TIMEOUT,
        "read_timeout": TOKEN_TIMEOUT,
        "retry_total": 1,
    }
    if identity.auth == "managed_identity":
        return ManagedIdentityCredential(client_id=identity.client_id, **limits)
    return DefaultAzureCredential(managed_identity_client_id=identity.client_id, **limits)
