"""``Config``: every key of the configuration with its default, as frozen structs."""

import os
import re
import sys
from pathlib import Path
from typing import Final, Literal

from msgspec import Struct, field

from notbefore.config.fleet import FleetConfig
from notbefore.config.messages import Messages
from notbefore.config.otlp import Otlp, otlp_headers
from notbefore.config.secret import Secret
from notbefore.config.sinks import PeersConfig, SinkConfig
from notbefore.core.approval import Policy
from notbefore.core.delivery import Routing
from notbefore.core.duration import Duration
from notbefore.core.record import MAX_TAG_NAME, MAX_TAGS
from notbefore.core.routing import Route

ApiVersion = Literal["2017-03-01", "2017-08-01", "2017-11-01", "2019-01-01", "2019-04-01", "2019-08-01", "2020-07-01"]


MAX_PORT: Final = 65_535
_LISTEN: Final = re.compile(r"(?:(?P<host>[A-Za-z0-9._-]*)|\[(?P<v6>[0-9A-Fa-f:.%a-z]+)\]):(?P<port>\d{1,5})", re.ASCII)


class _Section(Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Imds(_Section, frozen=True):
    """Where IMDS is, and how often it is polled."""

    endpoint: str = "http://169.254.169.254"
    discover: bool = True  # if the usual endpoint does not answer, look for another (DHCP option 245)
    api_version: ApiVersion = "2020-07-01"
    interval: Duration = Duration("1s")  # 100ms to 10s; Azure asks for one poll a second

    def __post_init__(self) -> None:
        if not self.endpoint.startswith("http://"):
            raise ValueError(f"endpoint: expected http://ADDRESS[:PORT] (IMDS has no TLS), got {self.endpoint!r}")
        if "/metadata" in self.endpoint:
            raise ValueError("endpoint: expected the address alone, http://169.254.169.254: the agent adds the path")
        if not 0.1 <= self.interval.seconds <= 10:  # noqa: PLR2004 - the bounds of the documentation
            raise ValueError(
                "interval: expected 100ms to 10s: a Preempt has 30 s of notice, and Azure asks for a poll a second"
            )


class VmName(_Section, frozen=True):
    """The name of this VM, where IMDS does not give it."""

    name: str | None = None


_NOT_IN_TAG: Final = frozenset("<>%&\\?/")  # what Azure allows in no name of a tag


class Records(_Section, frozen=True):
    """What records and heartbeats say beyond their fixed attributes."""

    tags: tuple[str, ...] = ()  # the names of tags of this VM, ten at most: `team` is the attribute `azure.tag.team`

    def __post_init__(self) -> None:
        if len(self.tags) > MAX_TAGS:
            raise ValueError(f"tags: expected {MAX_TAGS} names or less, got {len(self.tags)}: records go to every sink")
        for name in self.tags:
            if not 0 < len(name) <= MAX_TAG_NAME or not name.isprintable() or _NOT_IN_TAG & set(name):
                raise ValueError(f"tags: expected the name of a tag, got {name[:80]!r}")


class Server(_Section, frozen=True):
    """Where metrics, page and API are served, ``host:port``, and who may read them."""

    listen: str = "127.0.0.1:10169"
    web_config_file: str | None = None  # TLS and passwords, in the form of Prometheus's exporter-toolkit
    insecure: bool = False  # listen beyond loopback without TLS and passwords: everybody may read
    allowed_hosts: tuple[str, ...] = ()  # the names that requests may use as Host; `*.example.org`: all names below it

    def __post_init__(self) -> None:
        host_and_port(self.listen)


def host_and_port(listen: str) -> tuple[str, int]:
    """Return the parts of ``host:port``, ``[v6]:port`` or ``:port`` (every address); raises ``ValueError``."""
    found = _LISTEN.fullmatch(listen)
    if found is None or int(found["port"]) > MAX_PORT:
        raise ValueError(f"listen: expected HOST:PORT such as 127.0.0.1:10169 or [::1]:10169, got {listen!r}")
    return found["v6"] or found["host"] or "", int(found["port"])


def default_state_dir() -> Path:
    """Return systemd's ``STATE_DIRECTORY``, or the usual place of the platform for the state of a service."""
    given = os.environ.get("STATE_DIRECTORY", "").split(":")[0]
    if given:
        return Path(given)
    if sys.platform == "win32":
        return Path(os.environ.get("PROGRAMDATA", r"C:\ProgramData")) / "notbefore"
    return Path("/var/lib/notbefore")


class State(_Section, frozen=True):
    """Where the state is kept, and how much of it."""

    dir: str = field(default_factory=lambda: str(default_state_dir()))
    history_max_bytes: int = 64 * 1024 * 1024  # of the records of past changes; the oldest are deleted. 64 KiB or more

    def __post_init__(self) -> None:
        if not self.dir.isprintable():
            raise ValueError(r"dir: in double quotes a backslash begins an escape: write C:\... in single quotes")
        if self.history_max_bytes < 64 * 1024:
            raise ValueError("history_max_bytes: expected 65536 or more")


class Log(_Section, frozen=True):
    """The agent's own log, on stderr. ``auto``: text on a terminal, JSON elsewhere."""

    format: Literal["auto", "json", "text"] = "auto"
    level: Literal["debug", "info", "warning", "error"] = "info"


class Families(_Section, frozen=True):
    """Which families /metrics has. OTLP has all of them."""

    exclude: tuple[str, ...] = ()  # their names, as in docs/metrics.md: `process_open_fds`, `notbefore_polls_total`


class Exposition(_Section, frozen=True):
    """What /metrics has."""

    compat: Literal["none", "webdevops"] = "none"  # `webdevops`: also the names of azure-scheduledevents-exporter
    families: Families = Families()


class HeartbeatConfig(_Section, frozen=True):
    """Signs of life while the agent polls well, for a dead man's switch: to a URL, a sink, or both."""

    every: Duration = Duration("60s")  # 10s to 1h
    ping_url: Secret | None = None  # POST with the state as text; `/fail` behind its path where the agent is not ready
    sink: str | None = None  # a webhook, or otlp_logs over HTTP: it gets the heartbeat as a record

    def __post_init__(self) -> None:
        if not 10 <= self.every.seconds <= 3600:  # noqa: PLR2004 - the bounds of the documentation
            raise ValueError("every: expected 10s to 1h")
        if self.ping_url is None and self.sink is None:
            raise ValueError("expected `ping_url` or `sink`")


class Config(_Section, frozen=True):
    """The whole configuration."""

    imds: Imds = Imds()
    vm: VmName = VmName()
    records: Records = Records()
    server: Server = Server()
    state: State = field(default_factory=State)
    log: Log = Log()
    exposition: Exposition = Exposition()
    sinks: dict[str, SinkConfig] = {}
    routes: tuple[Route, ...] = ()  # without any, changes of events that affect this VM go to every sink
    messages: Messages = Messages()
    heartbeat: HeartbeatConfig | None = None  # a dead man's switch
    peers: PeersConfig | None = None  # without it no agent knows whether another one is alive
    approval: Policy = Policy()
    fleet: FleetConfig | None = None  # for `notbefore fleet` alone
    otlp: Otlp | None = None  # metrics over OTLP; without it, the OTEL_* variables decide

    @property
    def routing(self) -> Routing:
        """The routes, and the terms of each sink: what decides where a change goes."""
        terms = {name: sink.settings.terms for name, sink in self.sinks.items()}
        return Routing(self.routes, terms, asks_peers=self.peers is not None)

    @property
    def hidden(self) -> tuple[str, ...]:
        """The environment variables that hold a secret of the agent's own; the courier does not inherit them."""
        ping_url = self.heartbeat.ping_url if self.heartbeat is not None else None
        secrets = (*otlp_headers(self.otlp).values(), *([ping_url] if ping_url is not None else []))
        return tuple(secret.variable for secret in secrets if secret.variable)
