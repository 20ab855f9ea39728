"""The identity of this VM: ``/metadata/instance`` -> ``Vm``."""

from typing import Any, Final

import msgspec
from msgspec import Struct

from notbefore.core.record import Vm
from notbefore.errors import ImdsError
from notbefore.imds.client import TIMEOUT, ImdsClient

PATH: Final = "/metadata/instance?api-version=2021-02-01"
# characters of a field; a resource id has about 200, the name of a tag at most 512
MAX_FIELD_TEXT: Final = 512
MAX_VM_TAGS: Final = 50  # Azure's own limit


class _Instance(Struct):
    compute: dict[str, Any]


def fetch_vm(client: ImdsClient, timeout: float = TIMEOUT) -> Vm:
    """Ask IMDS for this VM's identity, within ``timeout`` seconds.

    Raises ``ImdsError`` (``rejected``: no name).
    """
    answer = client.get(PATH, timeout=timeout)
    try:
        instance = msgspec.json.decode(answer.body, type=_Instance)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ImdsError("rejected", f"/metadata/instance: {error}") from error
    vm = vm_of(instance.compute)
    if not vm.name:
        raise ImdsError("rejected", "/metadata/instance has no compute.name")
    return vm


def vm_of(compute: dict[str, Any]) -> Vm:
    """Return the used fields of ``compute``; a field that is missing or not a text is empty."""
    return Vm(
        name=_text(compute, "name"),
        vm_id=_text(compute, "vmId"),
        resource_id=_text(compute, "resourceId"),
        subscription_id=_text(compute, "subscriptionId"),
        resource_group=_text(compute, "resourceGroupName"),
        location=_text(compute, "location"),
        zone=_text(compute, "zone"),
        scale_set=_text(compute, "vmScaleSetName"),
        vm_size=_text(compute, "vmSize"),
        tags=_tags(compute.get("tagsList")),
    )


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        return ""
    return value[:MAX_FIELD_TEXT]


def _tags(items: object) -> dict[str, str]:
    """Return the tags of ``[{"name": ..., "value": ...}]``, without items of another form."""
    if not isinstance(items, list):
        return {}
    tags: dict[str, str] = {}
    for item in items[:MAX_VM_TAGS]:
        if not isinstance(item, dict):
            continue
        name = item.get("name")
        value = item.get("value")
        if isinstance(name, str) and isinstance(value, str):
            tags[name[:MAX_FIELD_TEXT]] = value[:MAX_FIELD_TEXT]
    return tags
