"""Checks of a configuration that need no connection: libraries, secrets, files, names."""

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from msgspec import Struct

from notbefore.config.model import Config
from notbefore.config.sinks import OTLP_LIBRARY, Messages, Otlp, SinkConfig, otlp_headers
from notbefore.errors import ConfigError

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,60}", re.ASCII)
_ROUTING_KEY: Final = re.compile(r"[A-Za-z0-9]{32}", re.ASCII)  # of PagerDuty; it answers 400 to any other length


Trial = Callable[[str, SinkConfig, Messages], None]
"""Makes the sink of that name without sending anything; raises ``ConfigError`` if it cannot be made."""


def check_sinks(config: Config, places: dict[str, str], environment: Mapping[str, str], *, trial: Trial | None) -> None:
    """Check libraries, secrets and files of the sinks, and the names in the routes; raises ``ConfigError``."""
    for name, sink in config.sinks.items():
        dotted = f"sinks.{name}.{sink.kind}"
        place = places.get(dotted, places.get("", "the configuration"))
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{place}: sinks.{name}: expected a name of letters, digits, - and _")
        try:
            check_installed(sink)
            for key, secret in sink.secrets.items():
                _check_secret(sink, key, secret.reveal(environment))
            _check_files(sink.settings)
            if trial is not None:
                trial(name, sink, config.messages)
        except ConfigError as error:
            raise ConfigError(f"{place}: {dotted}: {error}") from None
    for number, route in enumerate(config.routes):
        for name in (*route.sinks, *route.fallback):
            if name not in config.sinks:
                place = places.get(f"routes[{number}].sinks", places.get("", "the configuration"))
                known = ", ".join(config.sinks) or "none"
                raise ConfigError(f"{place}: routes[{number}].sinks: there is no sink {name!r} (known: {known})")


def check_installed(config: SinkConfig) -> None:
    """Raise ``ConfigError`` if a library that the sink needs is not installed; imports none of them."""
    from importlib.util import find_spec  # noqa: PLC0415 - only where there are sinks

    settings = config.settings
    if config.kind == "windows_event_log" and sys.platform != "win32":
        raise ConfigError("windows_event_log: only Windows has this log")
    if settings.NEEDS is not None:
        module, extra = settings.NEEDS
        if not _found(module, find_spec):
            raise ConfigError(f"{config.kind} needs {module}: pip install 'azure-notbefore[{extra}]'")
    check_otlp_installed(getattr(settings, "protocol", ""))


def check_otlp_installed(protocol: str) -> None:
    """Raise ``ConfigError`` if a library that the protocol of OTLP needs is not installed."""
    from importlib.util import find_spec  # noqa: PLC0415 - only where it is configured

    if protocol and not _found(OTLP_LIBRARY, find_spec):
        raise ConfigError("otlp needs OpenTelemetry's SDK: pip install 'azure-notbefore[otlp]'")
    if protocol == "grpc" and not _found("opentelemetry.exporter.otlp.proto.grpc", find_spec):
        raise ConfigError("protocol grpc needs an exporter of its own: pip install 'azure-notbefore[otlp-grpc]'")


def _found(name: str, find_spec: Callable[[str], object]) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


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
        place = places.get(where) or places.get("otlp.endpoint") or places.get("", "the configuration")
        raise ConfigError(f"{place}: {where}: {error}") from None


def _check_files(settings: Struct) -> None:
    """Raise ``ConfigError`` for a certificate or key file that cannot be read."""
    for key in settings.__struct_fields__:
        path = getattr(settings, key)
        if not key.endswith("_file") or path is None:
            continue
        try:
            Path(path).open("rb").close()
        except OSError as error:
            raise ConfigError(f"{key}: {path} cannot be read: {error.strerror}") from None


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
