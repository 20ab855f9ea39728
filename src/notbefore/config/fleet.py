"""The section ``fleet``: what ``notbefore fleet`` reads, and how it groups what it reads."""

from typing import Final, Literal

from msgspec import Struct

from notbefore.config.secret import Secret
from notbefore.config.sinks import EventHub
from notbefore.core.duration import Duration
from notbefore.core.text import one_of

MONTH: Final = 31 * 86_400.0  # seconds

GROUP_LABELS: Final = (
    *("event_id", "event_type", "event_source", "region", "zone", "subscription", "resource_group", "scale_set"),
    "tags.NAME",
)


class FleetHub(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The Event Hub that is read: a ``connection_string``, or ``namespace`` and ``hub`` with an identity."""

    connection_string: Secret | None = None  # with a key, instead of an identity
    namespace: str | None = None  # such as fleet.servicebus.windows.net
    hub: str | None = None  # the name of the hub
    auth: Literal["managed_identity", "default"] = "managed_identity"  # default: azure-identity's chain
    client_id: str | None = None  # of a user-assigned identity
    authority: str | None = None  # of another cloud: login.microsoftonline.us, beside `auth: default`
    audience: str | None = None  # of another cloud: https://eventhubs.azure.us
    transport: Literal["amqp", "websockets"] = "amqp"  # port 5671, or 443
    proxy_host: str | None = None  # for websockets
    proxy_port: int = 8080  # beside `proxy_host`
    endpoint: str | None = None  # another address to connect to: sb://HOST:PORT
    ca_file: str | None = None  # of a private CA, instead of the known ones
    timeout: Duration = Duration("15s")  # for one question to the hub

    def __post_init__(self) -> None:
        _ = self.settings  # the same is right and wrong of both

    @property
    def settings(self) -> EventHub:
        """How to reach it, as the sink ``event_hub`` has it. Raises ``ValueError``, with what is wrong."""
        return EventHub(**{name: getattr(self, name) for name in self.__struct_fields__})


class Checkpoints(Struct, frozen=True, forbid_unknown_fields=True):
    """Blob Storage, which lets several instances share a hub: ``container_url`` or ``connection_string``."""

    container_url: str | None = None  # https://ACCOUNT.blob.core.windows.net/CONTAINER, with the identity of `hub`
    connection_string: Secret | None = None  # of the storage account, instead of an identity
    container: str | None = None  # beside `connection_string`

    def __post_init__(self) -> None:
        if (self.container_url is None) == (self.connection_string is None):
            raise ValueError("expected either `container_url`, or `connection_string` and `container`")
        if self.connection_string is not None and not self.container:
            raise ValueError("expected `container` beside `connection_string`")


class HistoryConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Where an instance writes the events that are over, and for how long it keeps them."""

    dir: str | None = None  # `history` in `state.dir`, unless given
    keep: Duration | None = None  # such as 400d: a month is deleted once all of it is older. Without it, never

    def __post_init__(self) -> None:
        if self.keep is not None and self.keep.seconds < MONTH:
            raise ValueError("keep: expected 31d or more: there is one file a month")


class FleetConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The section ``fleet``."""

    hub: FleetHub  # where it is, and as whom to read
    consumer_group: str = "$Default"
    checkpoints: Checkpoints | None = None  # without it one instance reads alone, and keeps them in `state.dir`
    window: Duration = Duration("2h")  # how far back it reads at the first start, or where a snapshot is lost
    group_by: tuple[str, ...] = (
        "event_id",
    )  # `event_id`: each event alone; else events that agree in these are a wave
    group_wait: Duration = Duration("10s")  # before the first notification of a wave; at most a third of the notice
    group_interval: Duration = Duration("5m")  # between two digests of a wave
    over_after: Duration = Duration("1h")  # after NotBefore or its start, an event that no VM reports as over is over
    rebalance: Duration = Duration("10s")  # how often the instances check who reads which partition
    takeover: Duration = Duration("60s")  # without a sign from an instance, others take over its partitions
    history: HistoryConfig = HistoryConfig()
    inventory_file: str | None = None  # the VMs that are to be heard from: names, or the JSON of `az graph query`
    missing_after: Duration = Duration("15m")  # a VM of it that is not heard from for so long is missing

    def __post_init__(self) -> None:
        if not self.group_by:
            raise ValueError("group_by: expected at least one label, such as event_id, or scale_set and event_type")
        for label in self.group_by:
            if label not in GROUP_LABELS[:-1] and not (label.startswith("tags.") and label != "tags."):
                raise ValueError(f"group_by: there is no {label!r} here{one_of(label, GROUP_LABELS)}")
        if "event_id" not in self.group_by and not {"subscription", "resource_group"} <= set(self.group_by):
            raise ValueError(
                "group_by: add subscription and resource_group: without them events of VMs that have nothing to do with"
                " each other would be one wave"
            )
        if self.takeover.seconds < 2 * self.rebalance.seconds:
            raise ValueError("takeover: expected twice `rebalance` or more")
