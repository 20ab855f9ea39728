"""The identity of this VM: ``/metadata/instance`` -> ``Vm``."""

from typing import Any, Final

import msgspec
from msgspec import Struct

from notbefore.core.record import Vm
from notbefore.errors import ImdsError
from notbefore.imds.client import TIMEOUT, ImdsClient

PATH: Final = "/metadata/instance?api-version=2021-02-01"
# characters of a field; a resource id has about 200, the name of a tag at most 512
MAX_TEXT: Final = 512
MAX_TAGS: Final = 50  # Azure's own limit


class _Instance(Struct):
    compute: dict[str, Any]


def fetch_vm(client: ImdsClient, timeout: float = TIMEOUT) -> Vm:
    """Ask IMDS for this VM's identity, within ``timeout`` seconds.

    Raises ``ImdsError`` (``rejected``: no name).
    """
    answer = client.get(PATH, timeout=timeout)
    try:
        compute = msgspec.json.decode(answer.body, type=_Instance).compute
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ImdsError("rejected", f"/metadata/instance: {error}") from error
    vm = vm_of(compute)
    if not vm.name:
        raise ImdsError("rejected", "/metadata/instance has no compute.name")
    return vm


def vm_of(compute: dict[str, Any]) -> Vm:
    """Return the used fields of ``compute``; a field that is missing or not a text is empty."""

    def text(name: str) -> str:
        value = compute.get(name)
        return value[:MAX_TEXT] if isinstance(value, str) else ""

    return Vm(
        name=text("name"),
        vm_id=text("vmId"),
        resource_id=text("resourceId"),
        subscription_id=text("subscriptionId"),
        resource_group=text("resourceGroupName"),
        location=text("location"),
        zone=text("zone"),
        scale_set=text("vmScaleSetName"),
        vm_size=text("vmSize"),
        tags=_tags(compute.get("tagsList")),
    )


def _tags(listed: object) -> dict[str, str]:
    """The tags of ``[{"name": ..., "value": ...}]``; items of another form are left out."""
    found: dict[str, str] = {}
    for tag in listed[:MAX_TAGS] if isinstance(listed, list) else ():
        name, value = (tag.get("name"), tag.get("value")) if isinstance(tag, dict) else (None, None)
        if isinstance(name, str) and isinstance(value, str):
            found[name[:MAX_TEXT]] = value[:MAX_TEXT]
    return found
