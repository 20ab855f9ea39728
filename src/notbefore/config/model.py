"""``Config``: the configuration as frozen structs, each key with its default."""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct, field

from notbefore.config.constraints import (
    MAX_PORT,
    AzureVersion,
    Constraint,
    HttpUrl,
    ManagementUrl,
    SecretUrl,
    StorageConnection,
    between,
    check_address,
    expect,
    matching,
    raise_mistakes,
)
from notbefore.config.sinks import EventHub, Messages, OtlpConnection, SinkConfig
from notbefore.core.approval import Policy
from notbefore.core.document import ENDPOINT
from notbefore.core.duration import Duration
from notbefore.core.record import MAX_TAG_NAME, MAX_TAGS
from notbefore.core.routing import Route, Routing
from notbefore.core.text import one_of

GROUP_LABELS: Final = (  # and ``tags.NAME``
    "event_id",
    "event_type",
    "event_source",
    "region",
    "zone",
    "subscription",
    "resource_group",
    "scale_set",
)
Labels = Annotated[tuple[str, ...], Meta(min_length=1)]
# all events of a wave have the same values of these
WAVE_LABELS: Final = ("subscription", "resource_group", "event_type")
ConsumerGroup = Annotated[
    str, matching(r"\$?[A-Za-z0-9._-]{1,50}", "the name of a consumer group, such as $Default")
]
BlobUrl = Annotated[  # the SDK sends no token over HTTP, not even to loopback
    HttpUrl,
    matching("https://[^/]+(?:/[^/]+)+/?", "https://ACCOUNT.blob.core.windows.net/CONTAINER"),
]
ApiVersion = Literal[
    "auto",
    "2017-03-01",
    "2017-08-01",
    "2017-11-01",
    "2019-01-01",
    "2019-04-01",
    "2019-08-01",
    "2020-07-01",
    "2024-07-09",
]
_LISTEN: Final = re.compile(  # the labels of a host name have at most 63 characters
    r"(?:(?P<host>(?:[A-Za-z0-9_-]{1,63}(?:\.|(?=:)))*)|\[(?P<v6>[0-9A-Fa-f:.%a-z]+)\]):(?P<port>\d{1,5})",
    re.ASCII,
)
LogLevel = Literal["debug", "info", "warn", "warning", "error"]


class Checkpoints(Struct, frozen=True, forbid_unknown_fields=True):
    """Blob Storage for several instances that share a hub: ``container_url`` or
    ``connection_string``.
    """

    # https://ACCOUNT.blob.core.windows.net/CONTAINER, with the identity of `hub`
    container_url: BlobUrl | None = None
    # of the storage account, instead of an identity
    connection_string: StorageConnection | None = None
    container: str | None = None  # together with `connection_string`

    def __post_init__(self) -> None:
        has_url = self.container_url is not None
        has_connection_string = self.connection_string is not None and bool(self.container)
        if has_url == has_connection_string:
            raise ValueError(
                "expected either `container_url`, or `connection_string` and `container`"
            )


class FleetApproval(Struct, frozen=True, forbid_unknown_fields=True):
    """`notbefore fleet approve EVENT_ID`, which uses the identity of `hub`."""

    enabled: bool = False  # also needs `notbefore fleet CONFIG --allow-approval`
    # of Azure Resource Manager; another one in sovereign clouds
    endpoint: ManagementUrl = "https://management.azure.com"
    # of Azure's Maintenance resource provider
    api_version: AzureVersion = "2023-10-01-preview"


class FleetConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """An instance of `notbefore fleet`: its hub, its waves, and how instances share the work."""

    hub: EventHub  # the hub and the identity to read it with; `expire_...` is for sinks
    consumer_group: ConsumerGroup = "$Default"
    # without it, one instance reads alone, with checkpoints in `state.dir`
    checkpoints: Checkpoints | None = None
    # how far back to read at the first start
    window: Duration = Duration("2h")
    # `event_id`: each event alone; else events with equal values form a wave
    group_by: Labels = ("event_id",)
    # before the first notification of a wave; at most a third of the notice
    group_wait: Duration = Duration("10s")
    # between two digests of a wave
    group_interval: Annotated[Duration, between("1s")] = Duration("5m")
    # an event counts as over this long after NotBefore or its start
    over_after: Annotated[Duration, between("1m")] = Duration("1h")
    # between two checks of which instance reads which partition
    rebalance: Annotated[Duration, between("1s")] = Duration("10s")
    # others take over the partitions of an instance silent this long
    takeover: Duration = Duration("20s")
    # at least 1d: delete older events; else never
    history_keep: Annotated[Duration, between("1d")] | None = None
    # additional labels of the metrics
    metrics_by: tuple[Literal["subscription", "resource_group"], ...] = ()
    inventory_file: str | None = None  # the expected VMs, one per line
    # a VM of the inventory that is silent for this long is missing
    missing_after: Duration = Duration("15m")
    approval: FleetApproval = FleetApproval()

    def __post_init__(self) -> None:
        mistakes: list[str] = []
        needs_identity = self.checkpoints is not None and self.checkpoints.container_url is not None
        if needs_identity and self.hub.connection_string is not None:
            mistakes.append(
                "checkpoints.container_url: the hub has no identity: use a connection_string"
                " and container"
            )
        if self.hub.heartbeat is not None:
            mistakes.append("hub.heartbeat: agents send heartbeats, the fleet only reads")
        mistakes += self._mistakes_of_group_by()
        if self.takeover.seconds < 2 * self.rebalance.seconds:
            mistakes.append("takeover: expected twice `rebalance` or more")
        raise_mistakes(mistakes)

    def _mistakes_of_group_by(self) -> list[str]:
        mistakes: list[str] = []
        missing = [label for label in WAVE_LABELS if label not in self.group_by]
        if missing and "event_id" not in self.group_by:
            mistakes.append(
                f"group_by: add {', '.join(missing)}: else events of unrelated VMs, or of several"
                " types, would be one wave"
            )
        for label in self.group_by:
            is_tag = label.startswith("tags.") and label != "tags."
            if label not in GROUP_LABELS and not is_tag:
                expected = one_of(label, [*GROUP_LABELS, "tags.NAME"])
                mistakes.append(f"group_by: there is no {label!r} here{expected}")
        return mistakes


def _check_imds(url: str) -> None:
    if not url.startswith("http://"):
        raise ValueError("expected http://ADDRESS[:PORT]: IMDS has no TLS")
    check_address(url)
    if "/metadata" in url or not set("?#").isdisjoint(url):
        raise ValueError(
            "expected the address alone, http://169.254.169.254: the agent adds the path"
        )


def host_and_port(listen: str) -> tuple[str, int]:
    """Return the parts of ``host:port``, ``[v6]:port`` or ``:port`` (every address).

    Raises ``ValueError``.
    """
    match = _LISTEN.fullmatch(listen)
    if match is None or int(match["port"]) > MAX_PORT:
        raise ValueError(
            f"expected HOST:PORT such as 127.0.0.1:10169 or [::1]:10169, got {listen!r}"
        )
    port = int(match["port"])
    if match["v6"]:
        return match["v6"], port
    return match["host"] or "", port


def local_url(host: str, port: int, *, tls: bool) -> str:
    """Return the URL for this machine of a server that listens at an address."""
    if host in ("", "0.0.0.0"):  # noqa: S104 - it is compared, not bound
        host = "127.0.0.1"
    elif host == "::":
        host = "::1"
    if ":" in host:
        host = f"[{host}]"
    if tls:
        return f"https://{host}:{port}"
    return f"http://{host}:{port}"


def _are_tag_names(names: Sequence[str]) -> bool:
    return len(names) <= MAX_TAGS and all(len(name) <= MAX_TAG_NAME for name in names)


def _is_printable(path: str) -> bool:
    return path != "" and path.isprintable()


PollInterval = Annotated[
    Duration,
    between("100ms", "10s", ": a Preempt has 30 s of notice, and Azure asks for a poll a second"),
]
TagNames = Annotated[
    tuple[str, ...],
    expect(
        _are_tag_names,
        f"{MAX_TAGS} names or less, each of {MAX_TAG_NAME} characters or less: records go to every"
        " sink",
    ),
]
StateDir = Annotated[
    str,
    expect(
        _is_printable,
        r"a path: in double quotes a backslash begins an escape: write C:\... in single quotes",
    ),
]
SinkName = Annotated[
    str, matching(r"[A-Za-z0-9_-]{1,60}", "a name of at most 60 letters, digits, - and _")
]


class _Section(Struct, frozen=True, forbid_unknown_fields=True):
    """The base of the sections that have only their own rules."""


class Imds(_Section, frozen=True):
    """The address of IMDS, and the interval of polls."""

    endpoint: Annotated[str, Constraint(_check_imds)] = ENDPOINT
    # if the usual endpoint does not answer, look for another (DHCP option 245)
    discover: bool = True
    api_version: ApiVersion = "auto"  # auto: the newest that the endpoint answers
    interval: PollInterval = Duration("1s")  # 100ms to 10s; Azure asks for one poll a second


class VmName(_Section, frozen=True):
    """The name of this VM, if IMDS does not give it."""

    name: str | None = None


class Records(_Section, frozen=True):
    """Additional attributes of records and heartbeats."""

    # names of this VM's tags, at most ten: `team` becomes the attribute `azure.tag.team`
    tags: TagNames = ()


class Server(_Section, frozen=True):
    """The address that serves metrics, page and API, ``host:port``, and who may read them."""

    listen: Annotated[str, Constraint(host_and_port)] = "127.0.0.1:10169"
    # TLS and passwords, in the format of Prometheus's exporter-toolkit
    web_config_file: str | None = None
    insecure: bool = False  # listen beyond loopback without TLS and passwords: everyone may read
    # the names that requests may have as Host; `*.example.org`: all names below it
    allowed_hosts: tuple[str, ...] = ()


def default_state_dir() -> Path:
    """Return systemd's ``STATE_DIRECTORY``, or the platform's usual directory for the state of a
    service.
    """
    from_systemd = os.environ.get("STATE_DIRECTORY", "").split(":")[0]
    if from_systemd:
        return Path(from_systemd)
    if sys.platform == "win32":
        return Path(os.environ.get("PROGRAMDATA", r"C:\ProgramData")) / "notbefore"
    return Path("/var/lib/notbefore")


def _default_state_dir() -> str:
    return str(default_state_dir())


class State(_Section, frozen=True):
    """The directory of the state."""

    # at most 94 bytes: a longer path leaves no room for the control socket
    dir: StateDir = field(default_factory=_default_state_dir)


class Log(_Section, frozen=True):
    """The agent's own log, on stderr. ``auto``: text on a terminal, JSON elsewhere."""

    format: Literal["auto", "json", "text"] = "auto"
    # `warn` is another name of `warning`
    level: LogLevel = "info"


class HeartbeatConfig(_Section, frozen=True, kw_only=True):
    """Requests to a URL while the agent works, for a dead man's switch."""

    every: Annotated[Duration, between("10s", "1h")] = Duration("60s")  # 10s to 1h
    # POST with the status as text; plus `/start` at the start, plus `/fail` while not ready
    ping_url: SecretUrl


class Otlp(OtlpConnection, frozen=True, kw_only=True):
    """The export of the metrics over OTLP.

    `expire_after` and `expire_on_end` are for OTLP sinks and have no effect here.
    """

    interval: Annotated[Duration, between("1s", "1h")] = Duration("60s")  # between two exports


class Config(_Section, frozen=True):
    """The whole configuration."""

    imds: Imds = Imds()
    vm: VmName = VmName()
    records: Records = Records()
    server: Server = Server()
    state: State = field(default_factory=State)
    log: Log = Log()
    sinks: dict[SinkName, SinkConfig] = {}
    # without any, a sink gets the events that affect this VM, an event hub gets all
    routes: tuple[Route, ...] = ()
    messages: Messages = Messages()
    heartbeat: HeartbeatConfig | None = None  # a dead man's switch
    approval: Policy = Policy()
    fleet: FleetConfig | None = None  # only for `notbefore fleet`
    otlp: Otlp | None = None  # metrics over OTLP; without it, none are exported

    @property
    def routing(self) -> Routing:
        """The routes, and the terms of each sink: together they decide where a change goes."""
        terms = {name: sink.settings.terms for name, sink in self.sinks.items()}
        return Routing(self.routes, terms)
