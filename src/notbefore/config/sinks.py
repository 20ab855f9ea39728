"""The settings of each kind of sink. Secrets are ``Secret``.

Every key has a default, except addresses and secrets.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, get_args
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct, field

from notbefore.config.constraints import (
    Headers,
    HeaderValue,
    HostName,
    HttpUrl,
    HubConnection,
    LinkUrl,
    MailAddress,
    MailPassword,
    MailUser,
    Password,
    Port,
    ReadableFile,
    SecretUrl,
    SendTimeout,
    TemplateText,
    TimeZone,
    between,
    expect,
    matching,
    raise_mistakes,
)
from notbefore.config.secret import Secret
from notbefore.core.duration import Duration
from notbefore.core.routing import Terms
from notbefore.errors import ConfigError
from notbefore.wording import texts

JSON_TYPE: Final = "application/json"
TLS_PORT: Final = 465  # of mail servers, without STARTTLS
KEY_WITHOUT_CERTIFICATE: Final = "expected `cert_file` together with `key_file`"
Advice = Annotated[str, matching(r"[\s\S]{0,2000}", "a text of 2000 characters or less")]


class Links(texts.LinkTemplates, frozen=True, forbid_unknown_fields=True):
    """Links in a message.

    `{vm}` is replaced by the name of the sending VM, `{event_type}` by Azure's type.
    """

    dashboard: LinkUrl | None = None
    runbook: LinkUrl | None = None
    page: LinkUrl | None = None  # the agent's page, such as https://{vm}.example.org:10169/


class Messages(texts.Additions, frozen=True, forbid_unknown_fields=True):
    """The texts in the messages of all sinks: templates, and additions to the built-in texts."""

    title: TemplateText | None = None  # a template that replaces the title
    body: TemplateText | None = None  # a template that replaces the text below the title
    # what to do, by event type (Reboot: text); replaces the built-in text
    advice: dict[str, Advice] = field(default_factory=dict)
    links: Links = Links()
    # such as Europe/Berlin: times are shown in this zone and in UTC
    time_zone: TimeZone | None = None


def _is_incoming_webhook(url: str) -> bool:
    return not re.match(r"https://hooks\.slack\.com/(?:workflows|triggers)/", url)


def _has_no_alerts_path(url: str) -> bool:
    return not re.search(r"/api/v\d+(?:/alerts)?/?$", url)


def _has_no_signal_path(url: str) -> bool:
    return not re.search(r"/v1/(?:metrics|logs|traces)/?$", url)


def _begins_with_absolute_path(words: Sequence[str]) -> bool:
    return len(words) > 0 and Path(words[0]).is_absolute()


SERVICE_ACCOUNT: Final = "/var/run/secrets/kubernetes.io/serviceaccount"  # in each pod
NodeName = Annotated[
    str,
    matching(
        r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?", "the name of a node, as `kubectl get nodes` has"
    ),
]
OtlpProtocol = Literal["http/protobuf", "grpc"]
ExpireAfter = Annotated[Duration, between("1s")]
LabelName = Annotated[
    str, matching(r"[a-zA-Z_][a-zA-Z0-9_]*", "the name of a label: letters, digits and _")
]
Namespace = Annotated[
    str,
    matching(
        r"[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+", "its whole name alone: fleet.servicebus.windows.net"
    ),
]
HubAddress = Annotated[
    str, matching(r"sb://[A-Za-z0-9.:\[\]-]+/?", "sb://HOST:PORT alone: a key is no part of it")
]
SlackUrl = Annotated[
    SecretUrl,
    expect(
        _is_incoming_webhook,
        "an incoming webhook, https://hooks.slack.com/services/...: a workflow takes other fields",
    ),
]
SlackToken = Annotated[
    Secret,
    matching(r"(?:xoxe\.)?xoxb-[!-~]+", "a bot token, which begins with xoxb-"),
]
SlackChannel = Annotated[
    str,
    matching(
        r"#?[^\s#@<>|,]{1,80}",
        'the name of a channel in quotes, "#oncall", or its id, such as C024BE91L',
    ),
]
AlertmanagerUrl = Annotated[
    HttpUrl,
    expect(
        _has_no_alerts_path,
        "the address of Alertmanager: the agent adds /api/v2/alerts",
    ),
]
OtlpUrl = Annotated[
    HttpUrl,
    expect(
        _has_no_signal_path,
        "the address of the receiver: the agent adds /v1/metrics or /v1/logs",
    ),
]
ResolveTimeout = Annotated[Duration, between("1s", "1d")]
RoutingKey = Annotated[  # PagerDuty answers 400 to any other length
    Secret,
    matching(r"[A-Za-z0-9]{32}", "the 32 letters and digits of an integration of Events API v2"),
]
Arguments = Annotated[
    tuple[str, ...],
    expect(
        _begins_with_absolute_path,
        "a list that begins with the absolute path of an executable",
    ),
]


class SinkSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings that all kinds have."""

    EXTRA: ClassVar[str] = ""  # the extra of the package that installs its library
    APPROVALS: ClassVar[bool] = True  # it also gets the results of approvals
    ONCE: ClassVar[bool] = False  # an attempt whose result is unknown is not repeated
    SIDE_BY_SIDE: ClassVar[int] = 4  # attempts at a time at most, each of another event
    EVERY_EVENT: ClassVar[bool] = False  # by default it also gets events that affect only other VMs
    HAS_TEXT: ClassVar[bool] = True  # it sends a text for people, not only the record
    SHARES_TEXT: ClassVar[bool] = False  # all VMs send it the same text about an event

    timeout: SendTimeout = Duration("10s")  # for one attempt
    # older deliveries are not sent, and counted as expired
    expire_after: ExpireAfter = Duration("24h")
    expire_on_end: bool = True  # announcements are not sent once the event is over

    @property
    def keeps_incidents(self) -> bool:
        """Whether its receiver keeps one incident for each event, whichever VMs report it."""
        return False

    @property
    def updates_message(self) -> bool:
        """Whether it keeps one message for each event, and updates it."""
        return False

    @property
    def request_template(self) -> str | None:
        """The template of the whole request, if the user has given one."""
        return None

    @property
    def is_json(self) -> bool:
        """Whether that request has to be JSON."""
        return False

    @property
    def terms(self) -> Terms:
        """The settings that concern its routes and deliveries."""
        return Terms(
            expire_after=self.expire_after.seconds,
            expire_on_end=self.expire_on_end,
            approvals=self.APPROVALS,
            once=self.ONCE,
            keeps_incidents=self.keeps_incidents,
            updates_message=self.updates_message,
            every_event=self.EVERY_EVENT,
        )


def _mistakes_of_authorization(settings: "Webhook | Alertmanager") -> list[str]:
    """Return the mistake if a login is incomplete, or if there is more than one authorization."""
    has_half_a_login = (settings.username is None) != (settings.password is None)
    authorizations = [name for name in settings.headers if name.lower() == "authorization"]
    if settings.username is not None:
        authorizations.append("username")
    if settings.token is not None:
        authorizations.append("token")
    if not has_half_a_login and len(authorizations) <= 1:
        return []
    return ["expected one of `username` with `password`, `token` and the header Authorization"]


class Slack(SinkSettings, frozen=True, kw_only=True):
    """A channel. ``url``: an incoming webhook. ``token``: of a bot, which updates its messages."""

    url: SlackUrl | None = None  # an incoming webhook
    token: SlackToken | None = None  # of a bot, together with `channel`
    channel: SlackChannel | None = None  # its name or id; the bot must be a member
    # of the Web API, for `token`; in GovSlack: https://slack-gov.com/api/
    api_url: HttpUrl = "https://slack.com/api/"

    def __post_init__(self) -> None:
        mistakes: list[str] = []
        if (self.url is None) == (self.token is None):
            mistakes.append("expected either `url`, an incoming webhook, or `token` and `channel`")
        elif (self.token is None) != (self.channel is None):
            mistakes.append(
                'expected `token` together with `channel`, in quotes: `channel: "#oncall"`'
            )
        raise_mistakes(mistakes)

    @property
    def updates_message(self) -> bool:
        """True with a token: a webhook cannot update what it has posted."""
        return self.token is not None


class Email(SinkSettings, frozen=True, kw_only=True):
    """A mail server and the recipients."""

    host: HostName  # the mail server's name or address
    port: Port | None = None  # default: 587 with starttls, 465 with tls, 25 with none
    tls: Literal["starttls", "tls", "none"] = "starttls"  # tls: encrypted from the first byte on
    user: MailUser | None = None  # together with `password`
    password: MailPassword | None = None  # together with `user`; both of ASCII characters
    to: Annotated[tuple[MailAddress, ...], Meta(min_length=1)]
    sender: MailAddress = field(name="from")
    ca_file: ReadableFile | None = None  # of a private CA, instead of the known ones

    def __post_init__(self) -> None:
        mistakes: list[str] = []
        if (self.user is None) != (self.password is None):
            mistakes.append("expected `user` and `password`, or none of them")
        if self.port == TLS_PORT and self.tls == "starttls":
            mistakes.append(
                f"port: at {TLS_PORT} a mail server expects TLS from the first byte on: `tls: tls`"
            )
        raise_mistakes(mistakes)


class PagerDuty(SinkSettings, frozen=True, kw_only=True):
    """An integration of PagerDuty's Events API v2: one incident per event, resolved when the event
    is over.
    """

    # an incident shows the event's state, which an approval does not change
    APPROVALS: ClassVar[bool] = False
    SHARES_TEXT: ClassVar[bool] = True

    routing_key: RoutingKey  # the integration key: 32 letters and digits
    # in the EU: https://events.eu.pagerduty.com/v2/enqueue
    url: HttpUrl = "https://events.pagerduty.com/v2/enqueue"
    ca_file: ReadableFile | None = None  # of a private CA, instead of the known ones
    expire_after: ExpireAfter = Duration("7d")  # an open incident has to be closed

    @property
    def keeps_incidents(self) -> bool:
        """True: it has one incident for each ``dedup_key``."""
        return True


class Apprise(SinkSettings, frozen=True, kw_only=True):
    """Any service that apprise knows, by its address."""

    EXTRA: ClassVar[str] = "apprise"

    url: Password


class Webhook(SinkSettings, frozen=True, kw_only=True):
    """A POST request with the record, or with the text of a template."""

    HAS_TEXT: ClassVar[bool] = False

    url: SecretUrl
    secret: Password | None = None  # the key of the signature
    headers: Headers = {}  # name: text, or {file: ...}, {env: ...}, {credential: ...}
    username: str | None = None  # of basic authentication, together with `password`
    password: Password | None = None  # together with `username`
    token: HeaderValue | None = None  # a bearer token
    ca_file: ReadableFile | None = None  # of a private CA, instead of the known ones
    cert_file: ReadableFile | None = None  # the client's certificate
    key_file: ReadableFile | None = None  # the key of `cert_file`, if that file does not contain it
    allow_private: bool = False  # allow loopback, link-local and private addresses
    # a field of the body with the event's key, by which the receiver keeps one incident an event
    dedup_key: LabelName | None = None
    # a template of the whole body, for a receiver that expects a form of its own
    body: TemplateText | None = None

    def __post_init__(self) -> None:
        mistakes = _mistakes_of_authorization(self)
        if self.key_file and not self.cert_file:
            mistakes.append(KEY_WITHOUT_CERTIFICATE)
        if self.dedup_key in ("time", "body"):
            mistakes.append("dedup_key: expected a name that no other field of the body has")
        if self.dedup_key is not None and self.body is not None:
            mistakes.append("dedup_key: write the event's key into the template `body` instead")
        raise_mistakes(mistakes)

    @property
    def keeps_incidents(self) -> bool:
        """Whether ``dedup_key`` tells the receiver which messages belong together."""
        return self.dedup_key is not None

    @property
    def request_template(self) -> str | None:
        """The template of the body."""
        return self.body

    @property
    def content_type(self) -> str:
        """The type of the template's text: that of the configured header, or JSON."""
        for name, value in self.headers.items():
            if name.lower() == "content-type":
                return value.reveal()
        return JSON_TYPE

    @property
    def is_json(self) -> bool:
        """Whether the content type says JSON, such as ``application/cloudevents+json``."""
        media_type = self.content_type.partition(";")[0].strip().lower()
        return media_type == JSON_TYPE or media_type.endswith("+json")


class Alertmanager(SinkSettings, frozen=True, kw_only=True):
    """The members of an Alertmanager cluster; it is enough that one accepts."""

    # an alert shows the event's state, which an approval does not change
    APPROVALS: ClassVar[bool] = False
    SHARES_TEXT: ClassVar[bool] = True

    # of every member of the cluster
    urls: Annotated[tuple[AlertmanagerUrl, ...], Meta(min_length=1)]
    username: str | None = None  # of basic authentication, together with `password`
    password: Password | None = None  # together with `username`
    token: HeaderValue | None = None  # a bearer token
    headers: Headers = {}  # such as X-Scope-OrgID, the tenant of Mimir; values as in `webhook`
    ca_file: ReadableFile | None = None  # of a private CA, instead of the known ones
    # Alertmanager's own; alerts are sent again after a third of it
    resolve_timeout: ResolveTimeout = Duration("5m")
    labels: dict[LabelName, str] = {}  # additional labels, the same on every VM

    def __post_init__(self) -> None:
        raise_mistakes(_mistakes_of_authorization(self))

    @property
    def keeps_incidents(self) -> bool:
        """True: it has one alert for each set of labels."""
        return True


class EventHub(SinkSettings, frozen=True, kw_only=True):
    """An Azure Event Hub: a ``connection_string``, or ``namespace`` and ``hub`` with the VM's
    identity.
    """

    EXTRA: ClassVar[str] = "eventhub"
    HAS_TEXT: ClassVar[bool] = False
    # a VM that is gone cannot report the end of its Preempt: the other VMs do
    EVERY_EVENT: ClassVar[bool] = True

    connection_string: HubConnection | None = None  # contains a key; replaces an identity
    namespace: Namespace | None = None  # such as fleet.servicebus.windows.net
    hub: str | None = None  # the name of the hub
    # default: azure-identity's chain
    auth: Literal["managed_identity", "default"] = "managed_identity"
    client_id: str | None = None  # of a user-assigned identity
    transport: Literal["amqp", "websockets"] = "amqp"  # port 5671, or 443
    endpoint: HubAddress | None = None  # connect to another address: sb://HOST:PORT
    ca_file: ReadableFile | None = None  # of a private CA, instead of the known ones
    # 5m or more: how often each VM sends a heartbeat
    heartbeat: Annotated[Duration, between("5m")] | None = None
    timeout: SendTimeout = Duration("15s")
    expire_after: ExpireAfter = Duration("7d")  # a stream should be complete
    expire_on_end: bool = False

    def __post_init__(self) -> None:
        has_address = self.namespace is not None and bool(self.hub)
        has_connection_string = self.connection_string is not None
        has_half_an_address = bool(self.namespace) and not has_address
        if has_half_an_address or has_address == has_connection_string:
            raise ValueError("expected either `connection_string`, or `namespace` and `hub`")


class Kubernetes(SinkSettings, frozen=True, kw_only=True):
    """The Kubernetes node of this agent.

    The sink creates an Event for each message. It adds a condition to the node while an event of
    this VM is listed.
    """

    HAS_TEXT: ClassVar[bool] = False
    # each message changes the same condition
    SIDE_BY_SIDE: ClassVar[int] = 1

    node_name: NodeName | None = None  # default: the environment variable NODE_NAME
    # of the API server; default: https://KUBERNETES_SERVICE_HOST:KUBERNETES_SERVICE_PORT
    url: HttpUrl | None = None
    token: HeaderValue = Secret(f"{SERVICE_ACCOUNT}/token", "file")  # of a service account
    ca_file: ReadableFile | None = None  # of the API server; default: `ca.crt` next to the token
    expire_after: ExpireAfter = Duration("7d")  # the condition has to be removed

    def api_server(self, environment: Mapping[str, str] = os.environ) -> str:
        """Return the address of the API server; raises ``ConfigError`` if nothing names it."""
        if self.url is not None:
            return self.url.rstrip("/")
        host = environment.get("KUBERNETES_SERVICE_HOST")
        port = environment.get("KUBERNETES_SERVICE_PORT")
        if not host or not port:
            raise ConfigError(
                "url: KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set: this is no"
                " pod. Set `url` to the address of the API server"
            )
        if ":" in host:
            host = f"[{host}]"
        return f"https://{host}:{port}"

    def node(self, environment: Mapping[str, str] = os.environ) -> str:
        """Return the name of the node; raises ``ConfigError`` if nothing names it."""
        node = self.node_name or environment.get("NODE_NAME")
        if not node:
            raise ConfigError(
                "node_name: the environment variable NODE_NAME is not set: the Helm chart sets it"
                " to the name of the node. Or set `node_name`"
            )
        return node


SOURCE_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,79}"
EventSource = Annotated[str, matching(SOURCE_NAME, "letters, digits, blanks and . _ -")]


class WindowsEventLog(SinkSettings, frozen=True, kw_only=True):
    """The event log of Windows."""

    EXTRA: ClassVar[str] = "windows"

    # of the entries; `notbefore event-source` registers it
    source: EventSource = "notbefore"
    expire_after: ExpireAfter = Duration("7d")  # a log should be complete
    expire_on_end: bool = False


class Command(SinkSettings, frozen=True, kw_only=True):
    """The user's own program with its arguments; no shell."""

    HAS_TEXT: ClassVar[bool] = False
    ONCE: ClassVar[bool] = True  # two drains of one event may do harm
    SIDE_BY_SIDE: ClassVar[int] = 8

    command: Arguments  # the absolute path of an executable, and its arguments
    timeout: SendTimeout = Duration("60s")  # then it is ended, with all processes that it started


class OtlpConnection(SinkSettings, frozen=True, kw_only=True):
    """The endpoint of OTLP and how to reach it.

    The sink ``otlp_logs`` sends each change as a log record.
    """

    EXTRA: ClassVar[str] = "otlp"
    HAS_TEXT: ClassVar[bool] = False

    # /v1/metrics or /v1/logs is added; without one, the OTEL_* variables decide
    endpoint: OtlpUrl | None = None
    # without one, OTEL_EXPORTER_OTLP_PROTOCOL decides, else it is http/protobuf
    protocol: OtlpProtocol | None = None
    headers: Headers = {}
    ca_file: ReadableFile | None = None
    cert_file: ReadableFile | None = None  # the client's certificate
    key_file: ReadableFile | None = None
    resource: dict[str, str] = {}  # additional resource attributes, in addition to those from IMDS
    expire_after: ExpireAfter = Duration("7d")  # a log should be complete
    expire_on_end: bool = False

    def __post_init__(self) -> None:
        mistakes: list[str] = []
        if self.key_file and not self.cert_file:
            mistakes.append(KEY_WITHOUT_CERTIFICATE)
        has_port = self.endpoint is None or urlsplit(self.endpoint).port is not None
        if self.protocol == "grpc" and not has_port:
            mistakes.append("endpoint: gRPC needs a port, such as http://HOST:4317")
        raise_mistakes(mistakes)


class Plugin(SinkSettings, frozen=True, kw_only=True):
    """A sink of another package, see [the Python API](python-api.md#a-sink-of-your-own).

    Its ``settings`` are converted to its own struct where the package is imported: in the courier
    and in ``check-config``, never in the agent.
    """

    name: str  # of its entry point in the group `notbefore.sinks`
    settings: dict[str, Any] = {}  # the keys that the sink defines
    incidents: bool = False  # its receiver keeps one incident for each event, and has to close it

    @property
    def keeps_incidents(self) -> bool:
        """Whether the user says so: the sink is not imported here."""
        return self.incidents


class SinkConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of ``sinks``: exactly one kind with its settings."""

    slack: Slack | None = None
    email: Email | None = None
    pagerduty: PagerDuty | None = None
    apprise: Apprise | None = None
    webhook: Webhook | None = None
    alertmanager: Alertmanager | None = None
    kubernetes: Kubernetes | None = None
    windows_event_log: WindowsEventLog | None = None
    command: Command | None = None
    event_hub: EventHub | None = None
    otlp_logs: OtlpConnection | None = None
    plugin: Plugin | None = None

    def __post_init__(self) -> None:
        kinds = [name for name in self.__struct_fields__ if getattr(self, name) is not None]
        if len(kinds) != 1:
            expected = f"exactly one of {', '.join(self.__struct_fields__)}"
            raise ValueError(f"expected {expected}, got {len(kinds)}")

    @property
    def kind(self) -> str:
        """The name of the kind."""
        return next(name for name in self.__struct_fields__ if getattr(self, name) is not None)

    @property
    def settings(self) -> SinkSettings:
        """The settings of the kind."""
        settings: SinkSettings = getattr(self, self.kind)
        return settings


TITLE_TEMPLATE: Final = "messages.title"
BODY_TEMPLATE: Final = "messages.body"
REQUEST_TEMPLATE: Final = "body"  # of the sink


def templates_of(sink: SinkConfig, messages: Messages) -> dict[str, str]:
    """Return the templates for the messages of a sink, by the names of their keys.

    The template of a whole request sees the texts of the other two.
    """
    settings = sink.settings
    if not settings.HAS_TEXT and settings.request_template is None:
        return {}
    templates = {
        TITLE_TEMPLATE: messages.title,
        BODY_TEMPLATE: messages.body,
        REQUEST_TEMPLATE: settings.request_template,
    }
    return {key: source for key, source in templates.items() if source is not None}


# the name of each kind -> its settings
KINDS: Final = {kind.name: get_args(kind.type)[0] for kind in msgspec.structs.fields(SinkConfig)}
