"""Addresses that are probably not what was meant: a page for a webhook, another service, a path that is added."""

import re
from collections.abc import Iterator
from typing import Final
from urllib.parse import SplitResult, urlsplit

from notbefore.config.model import Config
from notbefore.config.secret import Secret
from notbefore.config.sinks import PagerDuty, SinkConfig, Slack

OTLP_PATHS: Final = ("/v1/metrics", "/v1/logs", "/v1/traces")
OTLP_PORTS: Final = {"http/protobuf": 4318, "grpc": 4317}
SERVICES: Final = {  # host of a service that does not understand the record that a webhook is sent -> the sink for it
    "hooks.slack.com": "slack",
    "events.pagerduty.com": "pagerduty",
    "events.eu.pagerduty.com": "pagerduty",
    "outlook.office.com": "apprise",
    "webhook.office.com": "apprise",
    "discord.com": "apprise",
    "api.telegram.org": "apprise",
}
_CHANNEL: Final = re.compile(r"[A-Z0-9]+")  # the id of a channel of Slack; a name has no capital letters


def unlikely(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the path of a key, and what is doubtful about its address."""
    connections = {f"sinks.{name}.otlp_logs": sink.otlp_logs for name, sink in config.sinks.items() if sink.otlp_logs}
    for key, connection in ({"otlp": config.otlp} | connections).items():
        if connection is not None and connection.endpoint:
            yield from ((f"{key}.endpoint", text) for text in _of_otlp(connection.endpoint, connection.protocol))
    for name, sink in config.sinks.items():
        yield from ((f"sinks.{name}.{sink.kind}.{key}", text) for key, text in _of_sink(sink))
    if config.peers is not None and urlsplit(config.peers.url).path in ("", "/"):
        yield "peers.url", "a page answers there even where the agent is not ready: write /readyz behind it"


def _of_otlp(endpoint: str, protocol: str) -> Iterator[str]:
    url = urlsplit(endpoint)
    if added := next((path for path in OTLP_PATHS if url.path.rstrip("/").endswith(path)), None):
        yield f"{added} is added to it: leave it out here"
    usual = OTLP_PORTS.get(protocol or "http/protobuf")
    if usual is not None and url.port in OTLP_PORTS.values() and url.port != usual:
        other = next(name for name, port in OTLP_PORTS.items() if port == url.port)
        yield f"{url.port} is the usual port of the protocol {other}: write {usual}, or `protocol: {other}`"


def _of_sink(sink: SinkConfig) -> Iterator[tuple[str, str]]:
    if sink.slack is not None:
        yield from _of_slack(sink.slack)
    if sink.pagerduty is not None:
        yield from _of_pagerduty(sink.pagerduty)
    host = (_split(sink.webhook.url).hostname or "") if sink.webhook is not None else ""
    for service, kind in SERVICES.items():
        if host == service or host.endswith(f".{service}"):
            yield "url", f"{service} does not understand what a webhook is sent: use the sink `{kind}`"
    for url in sink.alertmanager.urls if sink.alertmanager is not None else ():
        if "/api/v" in url:
            yield "urls", f"/api/v2/alerts is added to it: leave the path out of {url}"


def _of_slack(slack: Slack) -> Iterator[tuple[str, str]]:
    url = _split(slack.url)
    if (url.hostname or "").endswith("slack.com") and not url.path.startswith("/services/"):
        yield "url", "this is not an incoming webhook: its address begins with https://hooks.slack.com/services/"
    if slack.channel is not None and not _CHANNEL.fullmatch(slack.channel):
        text = (
            f"Slack updates a message only by the id of its channel, such as C0123ABCD, and {slack.channel!r} is none"
        )
        yield "channel", f"{text}: it stands at the end of the channel's details"


def _of_pagerduty(pagerduty: PagerDuty) -> Iterator[tuple[str, str]]:
    if not urlsplit(pagerduty.url).path.endswith("/v2/enqueue"):
        yield "url", "this is not the Events API v2: its address ends with /v2/enqueue"


def _split(secret: Secret | None) -> SplitResult:
    return urlsplit(secret.reveal() if secret is not None else "")
