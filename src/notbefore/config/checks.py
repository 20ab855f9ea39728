"""Checks of a configuration that need no connection: libraries, secrets, files, names."""

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from msgspec import Struct

from notbefore.config.fleet import FleetConfig
from notbefore.config.messages import Messages
from notbefore.config.model import Config
from notbefore.config.open_file import open_file
from notbefore.config.otlp import OTLP_LIBRARY, Otlp, otlp_headers
from notbefore.config.sinks import SinkConfig
from notbefore.config.yaml_file import located
from notbefore.core.text import one_of
from notbefore.errors import ConfigError

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,60}", re.ASCII)
_OTHER_FAMILIES: Final = ("process_", "azure_scheduledevent_")  # of the process, and of `exposition.compat`
_ROUTING_KEY: Final = re.compile(r"[A-Za-z0-9]{32}", re.ASCII)  # of PagerDuty; it answers 400 to any other length


Trial = Callable[[str, SinkConfig, Messages], None]
"""Makes the sink of that name without sending anything; raises ``ConfigError`` if it cannot be made."""


def check_sinks(config: Config, places: dict[str, str], environment: Mapping[str, str], *, trial: Trial | None) -> None:
    """Check libraries, secrets and files of the sinks, and the names in the routes; raises ``ConfigError``."""
    for name, sink in config.sinks.items():
        dotted = f"sinks.{name}.{sink.kind}"
        if not _NAME.fullmatch(name):
            raise located(places, f"sinks.{name}", "expected a name of letters, digits, - and _")
        try:
            check_installed(sink)
            for key, secret in sink.secrets.items():
                _check_secret(sink, key, secret.reveal(environment))
            _check_files(sink.settings)
            if trial is not None:
                trial(name, sink, config.messages)
        except ConfigError as error:
            raise located(places, dotted, str(error)) from None
    for number, route in enumerate(config.routes):
        for key, names in (("sinks", route.sinks), ("fallback", route.fallback)):
            for name in names:
                if name not in config.sinks:
                    known = one_of(name, config.sinks) if config.sinks else ": write it under `sinks`"
                    raise located(places, f"routes[{number}].{key}", f"there is no sink {name!r}{known}")


def command_problem(program: str) -> str:
    """Return why a program cannot be run, and what to do about it; empty if it can be."""
    from shutil import which  # noqa: PLC0415 - only where there are commands

    if which(program) is not None:
        return ""
    path = Path(program)
    if path.is_dir():
        return f"{program} is a directory: name the program in it"
    if path.exists():
        return f"{program} is not executable: chmod +x {program}"
    return f"{program} is not there: install it, or correct the path"


def installed(module: str) -> bool:
    """Return whether a module is installed; imports at most the packages around it."""
    from importlib.util import find_spec  # noqa: PLC0415 - only where a library is needed

    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it is not there
        return False


def check_installed(config: SinkConfig) -> None:
    """Raise ``ConfigError`` if a library that the sink needs is not installed; imports none of them."""
    settings = config.settings
    if config.kind == "windows_event_log" and sys.platform != "win32":
        raise ConfigError("windows_event_log: only Windows has this log")
    if settings.NEEDS is not None:
        module, extra = settings.NEEDS
        if not installed(module):
            raise ConfigError(f"{config.kind} needs {module}: pip install 'azure-notbefore[{extra}]'")
    check_otlp_installed(getattr(settings, "protocol", ""))


def check_otlp_installed(protocol: str) -> None:
    """Raise ``ConfigError`` if a library that the protocol of OTLP needs is not installed."""
    if protocol and not installed(OTLP_LIBRARY):
        raise ConfigError("otlp needs OpenTelemetry's SDK: pip install 'azure-notbefore[otlp]'")
    if protocol == "grpc" and not installed("opentelemetry.exporter.otlp.proto.grpc"):
        raise ConfigError("protocol grpc needs an exporter of its own: pip install 'azure-notbefore[otlp-grpc]'")


def check_families(excluded: Iterable[str], places: dict[str, str]) -> None:
    """Check the names in ``exposition.families.exclude``; raises ``ConfigError``."""
    if not excluded:
        return
    from notbefore.metrics.families import METRICS, is_named  # noqa: PLC0415 - only where there are any

    for name in excluded:
        if not (name.startswith(_OTHER_FAMILIES) or any(is_named(metric.name, (name,)) for metric in METRICS)):
            place = places.get("exposition.families.exclude", places.get("", "the configuration"))
            raise ConfigError(
                f"{place}: exposition.families.exclude: no metric is called {name!r} (see docs/metrics.md)"
            )


def check_heartbeat(config: Config, places: dict[str, str], environment: Mapping[str, str]) -> None:
    """Check the secret and the sink of the section ``heartbeat``; raises ``ConfigError``."""
    heartbeat = config.heartbeat
    try:
        if heartbeat is not None and heartbeat.ping_url is not None:
            _check_ping_url(heartbeat.ping_url.reveal(environment))
        if heartbeat is not None and heartbeat.sink is not None:
            _check_heartbeat_sink(heartbeat.sink, config.sinks)
    except ConfigError as error:
        raise located(places, "heartbeat", str(error)) from None


def _check_ping_url(address: str) -> None:
    try:
        url = urlsplit(address)
    except ValueError:  # its text shows the address
        raise ConfigError("ping_url: not a URL") from None
    if url.scheme not in ("http", "https") or not url.hostname or url.username is not None:
        raise ConfigError("ping_url: expected http://HOST or https://HOST")


def _check_heartbeat_sink(name: str, sinks: Mapping[str, SinkConfig]) -> None:
    sink = sinks.get(name)
    otlp = sink.otlp_logs if sink is not None else None
    if sink is None or (sink.webhook is None and otlp is None):
        raise ConfigError(
            f"sink: expected the name of a webhook or of otlp_logs, got {name!r}. An event_hub has a key"
            " `heartbeat` of its own; for most other receivers use `ping_url`"
        )
    if otlp is not None and (otlp.protocol == "grpc" or not (otlp.endpoint or otlp.logs_endpoint)):
        raise ConfigError("sink: a heartbeat goes over HTTP: expected an endpoint, and not protocol grpc")


def check_otlp(otlp: Otlp | None, places: dict[str, str], environment: Mapping[str, str]) -> None:
    """Check libraries, secrets and files of the section ``otlp``; raises ``ConfigError``."""
    if otlp is None:
        return
    try:
        where = "otlp"
        check_otlp_installed(otlp.protocol)
        for where, secret in otlp_headers(otlp).items():
            check_header(where.partition(".headers.")[2], secret.reveal(environment))
        where = "otlp"
        _check_files(otlp)
        if otlp.logs is not None:
            where = "otlp.logs"
            check_otlp_installed(otlp.logs.protocol)
            _check_files(otlp.logs)
    except ConfigError as error:
        raise located(places, where, str(error)) from None


def check_fleet(fleet: FleetConfig | None, places: dict[str, str], environment: Mapping[str, str]) -> None:
    """Check the connection strings of the section ``fleet``; raises ``ConfigError``."""
    if fleet is None:
        return
    try:
        where, hub, store = "fleet.hub", fleet.hub, fleet.checkpoints
        if hub.connection_string is not None:
            _check_connection_string(hub.connection_string.reveal(environment), hub.hub)
        where = "fleet.checkpoints"
        if store is not None and store.connection_string is not None:
            _check_storage_string(store.connection_string.reveal(environment))
    except ConfigError as error:
        raise located(places, where, str(error)) from None


def _check_storage_string(value: str) -> None:
    parts = [part.partition("=") for part in value.strip().rstrip(";").split(";")]
    names = {name.strip().lower() for name, _, text in parts if text}
    signed = {"accountname", "accountkey"} <= names or {"blobendpoint", "sharedaccesssignature"} <= names
    if not signed or not all(equals for _, equals, _ in parts):
        raise ConfigError(
            "connection_string: expected AccountName=NAME;AccountKey=KEY;EndpointSuffix=core.windows.net,"
            " as the storage account shows it"
        )


def _check_files(settings: Struct) -> None:
    """Raise ``ConfigError`` for a certificate or key file that cannot be read."""
    for key in settings.__struct_fields__:
        path = getattr(settings, key)
        if not key.endswith("_file") or path is None:
            continue
        try:
            open_file(Path(path)).close()
        except OSError as error:
            hint = "" if str(path).isprintable() else r": in double quotes \t is a tab: write a path in single quotes"
            raise ConfigError(f"{key}: {path} cannot be read: {error.strerror}{hint}") from None


def _check_secret(sink: SinkConfig, key: str, value: str) -> None:
    """Check the form of a secret; no error shows its value."""
    if key == "token" or key.startswith("headers."):
        check_header(key, value)
    elif key == "routing_key":
        if not _ROUTING_KEY.fullmatch(value):
            raise ConfigError("routing_key: expected the 32 letters and digits of an integration of Events API v2")
    elif key == "connection_string":
        _check_connection_string(value, sink.event_hub.hub if sink.event_hub else None)
    elif key == "url":
        _check_url(sink, value)


def check_header(key: str, value: str) -> None:
    """Raise ``ConfigError`` for what cannot be the value of a header; its text does not show the value."""
    wrong = next((place for place, letter in enumerate(value, start=1) if not " " <= letter <= "\xff"), None)
    if wrong is not None or value != value.strip():
        where = f"its character {wrong}" if wrong else "the space around it"
        raise ConfigError(f"{key}: expected one line of text that a header can hold: check {where}")


def _check_connection_string(value: str, hub: str | None) -> None:
    parts = {name.strip().lower() for name, equals, text in (part.partition("=") for part in value.split(";")) if text}
    signed = {"sharedaccesskeyname", "sharedaccesskey"} <= parts or "sharedaccesssignature" in parts
    if "endpoint" not in parts or not signed:
        raise ConfigError(
            "connection_string: expected Endpoint=sb://NAMESPACE/;SharedAccessKeyName=NAME;SharedAccessKey=KEY;EntityPath=HUB"
        )
    if "entitypath" not in parts and not hub:
        raise ConfigError("connection_string: expected EntityPath=HUB in it, or the key `hub` beside it")


def _check_url(sink: SinkConfig, value: str) -> None:
    try:
        url = urlsplit(value)
        _ = url.port
    except ValueError:
        raise ConfigError("url: not a URL. Special characters in a password are written as %XX") from None
    if sink.kind in ("webhook", "slack") and (url.scheme not in ("http", "https") or not url.hostname):
        raise ConfigError("url: expected http://HOST or https://HOST")
    if sink.kind == "email" and url.scheme not in ("mailto", "mailtos"):
        raise ConfigError("url: expected mailtos://USER:PASSWORD@HOST?from=vm@example.org&to=ops@example.org")
    if sink.kind == "webhook" and url.username is not None:
        raise ConfigError("url: expected no user and password in it: give them under `headers`")


def webhook_problem(sink: SinkConfig) -> str:
    """Return why the courier would not connect to a webhook; empty if it would, or if it leads to a name."""
    from ipaddress import ip_address  # noqa: PLC0415 - only where there are webhooks

    if sink.webhook is None or sink.webhook.allow_private:
        return ""
    host = urlsplit(sink.webhook.url.reveal()).hostname or ""
    try:
        private = host == "localhost" or not ip_address(host).is_global
    except ValueError:
        return ""
    return f"{host} is not a public address: set `allow_private: true` if it is the right one" if private else ""
