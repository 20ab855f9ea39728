"""The section ``fleet``: what ``notbefore fleet`` reads, and how it groups what it reads."""

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from notbefore.config.constraints import HttpUrl, StorageConnection, refuse
from notbefore.config.sinks import EventHub
from notbefore.core.duration import Duration
from notbefore.core.text import one_of

GROUP_LABELS: Final = (
    *("event_id", "event_type", "event_source", "region", "zone", "subscription", "resource_group", "scale_set"),
    "tags.NAME",
)
Labels = Annotated[tuple[str, ...], Meta(min_length=1)]


class Checkpoints(Struct, frozen=True, forbid_unknown_fields=True):
    """Blob Storage, which lets several instances share a hub: ``container_url`` or ``connection_string``."""

    container_url: HttpUrl | None = None  # https://ACCOUNT.blob.core.windows.net/CONTAINER, with the identity of `hub`
    connection_string: StorageConnection | None = None  # of the storage account, instead of an identity
    container: str | None = None  # beside `connection_string`

    def __post_init__(self) -> None:
        if (self.container_url is not None) == (self.connection_string is not None and bool(self.container)):
            raise ValueError("expected either `container_url`, or `connection_string` and `container`")


class FleetConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The section ``fleet``."""

    hub: EventHub  # where it is, and as whom to read; `expire_...` is for sinks
    consumer_group: str = "$Default"
    checkpoints: Checkpoints | None = None  # without it one instance reads alone, and keeps them in `state.dir`
    window: Duration = Duration("2h")  # how far back it reads at the first start, or where a snapshot is lost
    group_by: Labels = ("event_id",)  # `event_id`: each event alone; else events that agree in these are a wave
    group_wait: Duration = Duration("10s")  # before the first notification of a wave; at most a third of the notice
    group_interval: Duration = Duration("5m")  # between two digests of a wave
    over_after: Duration = Duration("1h")  # after NotBefore or its start, an event that no VM reports as over is over
    rebalance: Duration = Duration("10s")  # how often the instances check who reads which partition
    takeover: Duration = Duration("60s")  # without a sign from an instance, others take over its partitions
    history_keep: Duration | None = None  # such as 400d: what was over before that is deleted. Without it, never
    metrics_by: tuple[Literal["subscription", "resource_group"], ...] = ()  # labels that the metrics have as well
    inventory_file: str | None = None  # the VMs that are to be heard from, one a line
    missing_after: Duration = Duration("15m")  # a VM of it that is not heard from for so long is missing

    def __post_init__(self) -> None:
        known = GROUP_LABELS[:-1]
        odd = [one for one in self.group_by if one not in known and not (one.startswith("tags.") and one != "tags.")]
        apart = "event_id" in self.group_by or {"subscription", "resource_group"} <= set(self.group_by)
        alone = "without them events of VMs that have nothing to do with each other would be one wave"
        refuse(
            (self.hub.heartbeat, "hub.heartbeat: agents send heartbeats, the fleet only reads"),
            (not apart, f"group_by: add subscription and resource_group: {alone}"),
            *((label, f"group_by: there is no {label!r} here{one_of(label, GROUP_LABELS)}") for label in odd),
            (self.takeover.seconds < 2 * self.rebalance.seconds, "takeover: expected twice `rebalance` or more"),
        )
