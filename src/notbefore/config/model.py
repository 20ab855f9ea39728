"""``Config``: the configuration as frozen structs, each key with its default."""

import os
import re
import sys
from pathlib import Path
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct, field

from notbefore.config.constraints import (
    MAX_PORT,
    Constraint,
    HttpUrl,
    SecretUrl,
    StorageConnection,
    between,
    check_address,
    expect,
    matching,
    refuse,
)
from notbefore.config.sinks import EventHub, Messages, OtlpConnection, SinkConfig
from notbefore.core.approval import Policy
from notbefore.core.document import ENDPOINT
from notbefore.core.duration import Duration
from notbefore.core.record import MAX_TAG_NAME, MAX_TAGS
from notbefore.core.routing import Route, Routing
from notbefore.core.text import one_of

GROUP_LABELS: Final = (
    *(
        "event_id",
        "event_type",
        "event_source",
        "region",
        "zone",
        "subscription",
        "resource_group",
        "scale_set",
    ),
    "tags.NAME",
)
Labels = Annotated[tuple[str, ...], Meta(min_length=1)]
# what all events of a wave share
ONE_WAVE: Final = (
    "subscription",
    "resource_group",
    "event_type",
)
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


class Checkpoints(Struct, frozen=True, forbid_unknown_fields=True):
    """Blob Storage for several instances that share a hub: ``container_url`` or
    ``connection_string``.
    """

    # https://ACCOUNT.blob.core.windows.net/CONTAINER, with the identity of `hub`
    container_url: BlobUrl | None = None
    # of the storage account, instead of an identity
    connection_string: StorageConnection | None = None
    container: str | None = None  # beside `connection_string`

    def __post_init__(self) -> None:
        if (self.container_url is not None) == (
            self.connection_string is not None and bool(self.container)
        ):
            raise ValueError(
                "expected either `container_url`, or `connection_string` and `container`"
            )


class FleetConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The section ``fleet``."""

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
    # after NotBefore or the start it counts as over
    over_after: Annotated[Duration, between("1m")] = Duration("1h")
    # between two looks at who reads which partition
    rebalance: Annotated[Duration, between("1s")] = Duration("10s")
    # others take over the partitions of an instance silent this long
    takeover: Duration = Duration("20s")
    history_keep: Annotated[Duration, between("1d")] | None = (
        None  # at least 1d: delete older events; else never
    )
    metrics_by: tuple[
        Literal["subscription", "resource_group"], ...
    ] = ()  # additional labels of the metrics
    inventory_file: str | None = None  # the expected VMs, one per line
    # a VM of the inventory that is silent for this long is missing
    missing_after: Duration = Duration("15m")

    def __post_init__(self) -> None:
        known = GROUP_LABELS[:-1]
        odd = [
            one
            for one in self.group_by
            if one not in known and not (one.startswith("tags.") and one != "tags.")
        ]
        lacking = [one for one in ONE_WAVE if not {one, "event_id"} & set(self.group_by)]
        alone = "else events of unrelated VMs, or of several types, would be one wave"
        anonymous = (
            self.hub.connection_string and self.checkpoints and self.checkpoints.container_url
        )
        refuse(
            (
                anonymous,
                (
                    "checkpoints.container_url: the hub has no identity: use a connection_string"
                    " and container"
                ),
            ),
            (self.hub.heartbeat, "hub.heartbeat: agents send heartbeats, the fleet only reads"),
            (lacking, f"group_by: add {', '.join(lacking)}: {alone}"),
            *(
                (label, f"group_by: there is no {label!r} here{one_of(label, GROUP_LABELS)}")
                for label in odd
            ),
            (
                self.takeover.seconds < 2 * self.rebalance.seconds,
                "takeover: expected twice `rebalance` or more",
            ),
        )


def _imds(url: str) -> None:
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
    found = _LISTEN.fullmatch(listen)
    if found is None or int(found["port"]) > MAX_PORT:
        raise ValueError(
            f"expected HOST:PORT such as 127.0.0.1:10169 or [::1]:10169, got {listen!r}"
        )
    return found["v6"] or found["host"] or "", int(found["port"])


def local_url(host: str, port: int, *, tls: bool) -> str:
    """Return the URL for this machine of a server that listens at an address."""
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


PollInterval = Annotated[
    Duration,
    between("100ms", "10s", ": a Preempt has 30 s of notice, and Azure asks for a poll a second"),
]
TagNames = Annotated[
    tuple[str, ...],
    expect(
        lambda names: len(names) <= MAX_TAGS and all(len(one) <= MAX_TAG_NAME for one in names),
        f"{MAX_TAGS} names or less, each of {MAX_TAG_NAME} characters or less: records go to every"
        " sink",
    ),
]
StateDir = Annotated[
    str,
    expect(
        lambda path: path and path.isprintable(),
        r"a path: in double quotes a backslash begins an escape: write C:\... in single quotes",
    ),
]
SinkName = Annotated[
    str, matching(r"[A-Za-z0-9_-]{1,60}", "a name of at most 60 letters, digits, - and _")
]


class _Section(Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Imds(_Section, frozen=True):
    """Where IMDS is, and how often it is polled."""

    endpoint: Annotated[str, Constraint(_imds)] = ENDPOINT
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
    """Where metrics, page and API are served, ``host:port``, and who may read them."""

    listen: Annotated[str, Constraint(host_and_port)] = "127.0.0.1:10169"
    # TLS and passwords, in the format of Prometheus's exporter-toolkit
    web_config_file: str | None = None
    insecure: bool = False  # listen beyond loopback without TLS and passwords: everybody may read
    allowed_hosts: tuple[
        str, ...
    ] = ()  # the names that requests may have as Host; `*.example.org`: all names below it


def default_state_dir() -> Path:
    """Return systemd's ``STATE_DIRECTORY``, or the platform's usual directory for the state of a
    service.
    """
    given = os.environ.get("STATE_DIRECTORY", "").split(":")[0]
    if given:
        return Path(given)
    if sys.platform == "win32":
        return Path(os.environ.get("PROGRAMDATA", r"C:\ProgramData")) / "notbefore"
    return Path("/var/lib/notbefore")


class State(_Section, frozen=True):
    """The directory of the state."""

    # at most 94 bytes: it has a socket
    dir: StateDir = field(default_factory=lambda: str(default_state_dir()))


class Log(_Section, frozen=True):
    """The agent's own log, on stderr. ``auto``: text on a terminal, JSON elsewhere."""

    format: Literal["auto", "json", "text"] = "auto"
    # `warn` is another name of `warning`
    level: Literal["debug", "info", "warn", "warning", "error"] = "info"


class HeartbeatConfig(_Section, frozen=True, kw_only=True):
    """Requests to a URL while the agent works, for a dead man's switch."""

    every: Annotated[Duration, between("10s", "1h")] = Duration("60s")  # 10s to 1h
    # POST with the status as text; plus `/start` at the start, plus `/fail` while not ready
    ping_url: SecretUrl


class Otlp(OtlpConnection, frozen=True, kw_only=True):
    """The metrics over OTLP.

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
    routes: tuple[
        Route, ...
    ] = ()  # without any, a sink gets the events that affect this VM, an event hub gets all
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
