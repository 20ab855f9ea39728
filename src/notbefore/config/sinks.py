"""What a user may set of each kind of sink. Secrets are wrapped; every key has a default but the address."""

import re
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, get_args

from msgspec import Struct, field

from notbefore.config.forms import Headers, check_address_form, check_header_names
from notbefore.config.otlp import OTLP_LIBRARY, OtlpCompression, OtlpConnection, OtlpProtocol
from notbefore.config.secret import Secret
from notbefore.core.delivery import MessageKind, Terms
from notbefore.core.duration import Duration

_LABEL: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*", re.ASCII)  # Prometheus's label name
_SOURCE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,199}", re.ASCII)  # becomes a key in Windows' registry
_HOST: Final = re.compile(r"[A-Za-z0-9.-]+", re.ASCII)
_HOST_OR_ADDRESS: Final = re.compile(r"[A-Za-z0-9._:-]+", re.ASCII)  # an IPv6 address is written without brackets
_ADDRESS: Final = re.compile(r"[^\s@<>,;:\"\\]+@[^\s@<>,;:\"\\]+")


class SinkSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What all kinds have in common."""

    NEEDS: ClassVar[tuple[str, str] | None] = None  # a module beyond the base, and the extra that installs it
    APPROVALS: ClassVar[bool] = True  # it is notified of approvals as well
    SHARED_SEVERITY: ClassVar[bool] = False  # the severity has to be the same from every VM
    WORDS: ClassVar[bool] = True  # people read it; else it is sent the record, and no template is taken
    BATCH: ClassVar[int] = 1  # messages that the sink takes at once, several of an event among them

    timeout: Duration = Duration("10s")  # for one attempt
    expire_after: Duration = Duration("24h")  # what is older is not sent any more, and counted as expired
    expire_on_end: bool = True  # what was announced is not sent once the event is over
    title: str | None = None  # a template (Jinja2) instead of the built-in text; not where the record is sent
    body: str | None = None  # as `title`
    titles: dict[MessageKind, str] = {}  # templates by the kind of message, before `title`
    bodies: dict[MessageKind, str] = {}  # as `titles`

    def __post_init__(self) -> None:
        if not 0.1 <= self.timeout.seconds <= 300:  # noqa: PLR2004 - the bounds of the documentation
            raise ValueError("timeout: expected 100ms to 5m")
        if self.expire_after.seconds < 1:
            raise ValueError("expire_after: expected 1s or more")
        templates = (self.title, self.body, *self.titles.values(), *self.bodies.values())
        if not self.WORDS and any(one is not None for one in templates):
            raise ValueError("title and body are not for a sink that is sent the record: leave them out")

    @property
    def repeatable(self) -> bool:
        """An attempt whose end nobody has seen may be made again."""
        return True

    @property
    def terms(self) -> Terms:
        """How long its deliveries are worth sending."""
        return Terms(self.expire_after.seconds, self.expire_on_end, self.APPROVALS, self.SHARED_SEVERITY, self.WORDS)


class Slack(SinkSettings, frozen=True, kw_only=True):
    """An incoming webhook (``url``), or a bot's ``token`` and the ``channel`` it writes to."""

    url: Secret | None = None  # an incoming webhook's address
    token: Secret | None = None  # a bot's: xoxb-...
    channel: str | None = None  # its id, beside `token`
    api: str = "https://slack.com/api"  # where a bot writes to

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.url is None) == (self.token is None):
            raise ValueError("expected either `url` (an incoming webhook) or `token` (a bot's)")
        if self.token is not None and not self.channel:
            raise ValueError("expected `channel` beside `token`")
        check_address_form(self.api, "api")


class Email(SinkSettings, frozen=True, kw_only=True):
    """A mail server by `host`, or all in one `url`: mailtos://USER:PASSWORD@HOST?from=vm@example.org&to=ops@example.org."""

    host: str | None = None  # the mail server's name or address
    port: int | None = None  # default: 587 with starttls, 465 with tls, 25 with none
    tls: Literal["starttls", "tls", "none"] = "starttls"  # tls: from the first byte on
    user: str | None = None  # beside `password`
    password: Secret | None = None  # beside `user`
    url: Secret | None = None  # instead of the keys above
    to: tuple[str, ...] = ()  # with `url`: instead of the recipients in it
    sender: str | None = field(default=None, name="from")  # with `url`: instead of the sender in it
    ca_file: str | None = None  # of a private CA, instead of the known ones

    def __post_init__(self) -> None:
        super().__post_init__()
        for address in (*self.to, *((self.sender,) if self.sender else ())):
            if not _ADDRESS.fullmatch(address):
                raise ValueError(f"expected a mail address such as ops@example.org, got {address!r}")
        if (self.host is None) == (self.url is None):
            raise ValueError("expected either `host` (the mail server) or `url`")
        if self.url is not None and (self.port or self.user or self.password or self.tls != "starttls"):
            raise ValueError("port, tls, user and password stand in the `url`: leave them out, or give `host` instead")
        if self.host is not None and not (self.sender and self.to):
            raise ValueError("expected `from` and `to` beside `host`")
        if self.host is not None and not _HOST_OR_ADDRESS.fullmatch(self.host):
            raise ValueError(f"host: expected a name or an address, got {self.host!r}")
        if (self.user is None) != (self.password is None):
            raise ValueError("expected `user` and `password`, or none of them")
        if self.port is not None and not 0 < self.port < 65_536:  # noqa: PLR2004 - what a port is
            raise ValueError(f"port: expected 1 to 65535, got {self.port}")


class PagerDuty(SinkSettings, frozen=True, kw_only=True):
    """An integration of PagerDuty's Events API v2: one incident an event, resolved when it is over."""

    APPROVALS: ClassVar[bool] = False  # an incident is the event's state, and they are none

    routing_key: Secret  # the integration key: 32 letters and digits
    url: str = "https://events.pagerduty.com/v2/enqueue"  # in the EU: https://events.eu.pagerduty.com/v2/enqueue
    ca_file: str | None = None  # of a private CA, instead of the known ones
    expire_after: Duration = Duration("7d")  # what is open is to be closed

    def __post_init__(self) -> None:
        super().__post_init__()
        check_address_form(self.url, "url")


class Apprise(SinkSettings, frozen=True, kw_only=True):
    """Any service that apprise knows, by its address."""

    NEEDS: ClassVar[tuple[str, str] | None] = ("apprise", "apprise")

    url: Secret


class Webhook(SinkSettings, frozen=True, kw_only=True):
    """POST of the record."""

    WORDS: ClassVar[bool] = False

    url: Secret
    secret: Secret | None = None  # the key of the signature
    headers: Headers = {}  # name: text, or {file: ...}, {env: ...}
    format: Literal["json", "cloudevents"] = "json"  # the bare record, or in the envelope of CloudEvents
    ca_file: str | None = None  # of a private CA, instead of the known ones
    cert_file: str | None = None  # the client's certificate
    key_file: str | None = None  # the key of `cert_file`, if that file does not contain it
    allow_private: bool = False  # loopback, link-local and private addresses

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.key_file and not self.cert_file:
            raise ValueError("expected `cert_file` beside `key_file`")
        check_header_names(self.headers)


class Alertmanager(SinkSettings, frozen=True, kw_only=True):
    """Every member of a cluster; one that accepts is enough."""

    APPROVALS: ClassVar[bool] = False  # an alert is the event's state, and they are none
    SHARED_SEVERITY: ClassVar[bool] = True  # it is a label: another one would be another alert

    urls: tuple[str, ...]  # of every member of the cluster
    username: str | None = None  # of basic authentication, beside `password`
    password: Secret | None = None  # beside `username`
    token: Secret | None = None  # bearer
    ca_file: str | None = None  # of a private CA, instead of the known ones
    resolve_timeout: Duration = Duration("5m")  # Alertmanager's own; alerts are sent again in a third of it
    generator_url: str = ""  # the link `generatorURL` of each alert
    labels: dict[str, str] = {}  # beside our own, the same on every VM

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.urls:
            raise ValueError("urls: expected at least one address of an Alertmanager")
        for url in self.urls:
            check_address_form(url, "urls")
        for name in self.labels:
            if not _LABEL.fullmatch(name):
                raise ValueError(f"labels: {name!r} is no name of a label")
        if not 1 <= self.resolve_timeout.seconds <= 86_400:  # noqa: PLR2004 - the bounds of the documentation
            raise ValueError("resolve_timeout: expected 1s to 1d")
        if (self.username is None) != (self.password is None) or (self.token and self.username):
            raise ValueError("expected `username` and `password`, or `token`, or none of them")


class EventHub(SinkSettings, frozen=True, kw_only=True):
    """An Azure Event Hub: a ``connection_string``, or ``namespace`` and ``hub`` with the VM's own identity."""

    NEEDS: ClassVar[tuple[str, str] | None] = ("azure.eventhub", "eventhub")
    WORDS: ClassVar[bool] = False
    BATCH: ClassVar[int] = 200

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
    format: Literal["structured", "binary"] = "structured"  # the envelope: around, or in the properties
    heartbeat: Duration | None = None  # 5m and up: each VM sends one so often
    timeout: Duration = Duration("15s")
    expire_after: Duration = Duration("7d")  # a stream is to be whole
    expire_on_end: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.connection_string is None) == (self.namespace is None):
            raise ValueError("expected either `connection_string`, or `namespace` and `hub`")
        if self.namespace is not None and not self.hub:
            raise ValueError("expected `hub` beside `namespace`")
        if self.namespace is not None and not _HOST.fullmatch(self.namespace):
            raise ValueError("namespace: expected its name alone, such as fleet.servicebus.windows.net")
        if self.authority is not None and self.auth == "managed_identity":
            raise ValueError("authority: expected beside `auth: default`; the VM's own identity has no use for it")
        if self.heartbeat is not None and self.heartbeat.seconds < 300:  # noqa: PLR2004 - five minutes
            raise ValueError("heartbeat: expected 5m or more")
        if self.proxy_host is not None and (self.transport != "websockets" or "/" in self.proxy_host):
            raise ValueError("proxy_host: expected a name or an address, beside `transport: websockets`")


class Command(SinkSettings, frozen=True, kw_only=True):
    """An executable of the user's, with its arguments; no shell."""

    WORDS: ClassVar[bool] = False

    command: tuple[str, ...]  # the absolute path of an executable, and its arguments
    timeout: Duration = Duration("60s")  # it is ended then, with all that it started
    rerun: bool = False  # run it again if its courier ended while it was running

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.command or not Path(self.command[0]).is_absolute():
            raise ValueError("command: expected a list that begins with the absolute path of an executable")

    @property
    def repeatable(self) -> bool:
        """Only what the user calls so: two drains at once may do harm."""
        return self.rerun


class OtlpLogs(SinkSettings, frozen=True, kw_only=True):
    """Each change as an OTLP log record. Without an endpoint of its own it takes that of the section ``otlp``."""

    NEEDS: ClassVar[tuple[str, str] | None] = (OTLP_LIBRARY, "otlp")
    WORDS: ClassVar[bool] = False
    BATCH: ClassVar[int] = 100

    endpoint: str | None = None
    logs_endpoint: str | None = None
    protocol: OtlpProtocol = "http/protobuf"
    headers: Headers = {}
    compression: OtlpCompression = "gzip"
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    resource: dict[str, str] = {}
    expire_after: Duration = Duration("7d")  # a log is to be whole
    expire_on_end: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        OtlpConnection.of(self)


class PeersConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Where the agents of the other VMs answer, for routes with `announce_by: leader`."""

    url: str  # with {vm} for the name in Resources: http://{vm}:10169/readyz
    ca_file: str | None = None  # of a private CA, instead of the known ones

    def __post_init__(self) -> None:
        check_address_form(self.url.replace("{vm}", "vm"), "url")
        if "{vm}" not in self.url:
            raise ValueError("url: expected {vm} where the name of a VM stands, as in http://{vm}:10169/readyz")


class WindowsEventLog(SinkSettings, frozen=True, kw_only=True):
    """Windows' event log, from where Azure Monitor takes it."""

    NEEDS: ClassVar[tuple[str, str] | None] = ("win32evtlogutil", "windows")
    source: str = "notbefore"  # an administrator registers it once
    log: str = "Application"  # the log in which it is registered

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("source", self.source), ("log", self.log)):
            if not _SOURCE.fullmatch(value):
                raise ValueError(f"{name}: expected letters, digits, spaces, dots, - and _")


class Plugin(SinkSettings, frozen=True, kw_only=True):
    """A sink of another package, by the name of its entry point in the group `notbefore.sinks`: docs/python-api.md."""

    WORDS: ClassVar[bool] = False

    use: str  # the name of the entry point
    settings: dict[str, Any] = {}  # what its package documents
    secrets: dict[str, Secret] = {}  # name: text, or {file: ...}, {env: ...}, {credential: ...}


class SinkConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of ``sinks``: exactly one kind with its settings."""

    slack: Slack | None = None
    email: Email | None = None
    pagerduty: PagerDuty | None = None
    apprise: Apprise | None = None
    webhook: Webhook | None = None
    alertmanager: Alertmanager | None = None
    command: Command | None = None
    event_hub: EventHub | None = None
    otlp_logs: OtlpLogs | None = None
    windows_event_log: WindowsEventLog | None = None
    plugin: Plugin | None = None

    def __post_init__(self) -> None:
        given = [name for name in self.__struct_fields__ if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"expected exactly one of {', '.join(self.__struct_fields__)}, got {len(given)}")

    @property
    def kind(self) -> str:
        """The name of the kind."""
        return next(name for name in self.__struct_fields__ if getattr(self, name) is not None)

    @property
    def settings(self) -> SinkSettings:
        """The settings of the kind."""
        settings: SinkSettings = getattr(self, self.kind)
        return settings

    @property
    def secrets(self) -> dict[str, Secret]:
        """Every secret in it, by the name of its key."""
        found: dict[str, Secret] = {}
        for name in self.settings.__struct_fields__:
            value: Any = getattr(self.settings, name)
            if isinstance(value, Secret):
                found[name] = value
            elif isinstance(value, dict):
                found |= {f"{name}.{key}": item for key, item in value.items() if isinstance(item, Secret)}
        return found


KINDS: Final = {item: get_args(annotation)[0] for item, annotation in SinkConfig.__annotations__.items()}
