"""What can be known of a configuration before the first message: libraries, secrets, files, names. No connection."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from msgspec import Struct

from notbefore.config.secret import Secret
from notbefore.config.sinks import Otlp, SinkConfig
from notbefore.delivery.sinks import check_installed, check_otlp_installed, try_out
from notbefore.errors import ConfigError

if TYPE_CHECKING:
    from notbefore.config.load import Config

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,60}", re.ASCII)


def otlp_headers(otlp: Otlp | None) -> dict[str, Secret]:
    """The headers of the section, by their paths; those of the agent's log as far as they are others."""
    if otlp is None:
        return {}
    logs = otlp.logs.headers if otlp.logs is not None else {}
    return {f"otlp.headers.{name}": secret for name, secret in otlp.headers.items()} | {
        f"otlp.logs.headers.{name}": secret for name, secret in logs.items() if secret != otlp.headers.get(name)
    }


def check_sinks(config: "Config", places: dict[str, str], environment: Mapping[str, str], *, trying: bool) -> None:
    """What can be known before the first message: libraries, secrets, names in routes."""
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
            if trying:
                try_out(name, sink, config.links)
        except ConfigError as error:
            raise ConfigError(f"{place}: {dotted}: {error}") from None
    for number, route in enumerate(config.routes):
        for name in route.sinks:
            if name not in config.sinks:
                place = places.get(f"routes[{number}].sinks", places.get("", "the configuration"))
                known = ", ".join(config.sinks) or "none"
                raise ConfigError(f"{place}: routes[{number}].sinks: there is no sink {name!r} (known: {known})")


def check_otlp(otlp: Otlp | None, places: dict[str, str], environment: Mapping[str, str]) -> None:
    """Libraries and secrets of the section."""
    if otlp is None:
        return
    try:
        where = "otlp"
        check_otlp_installed(otlp.protocol)
        for where, secret in otlp_headers(otlp).items():
            _check_header(where.partition(".headers.")[2], secret.reveal(environment))
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
    """The certificates and keys that are named are there."""
    for key in settings.__struct_fields__:
        path = getattr(settings, key)
        if not key.endswith("_file") or path is None:
            continue
        try:
            Path(path).open("rb").close()
        except OSError as error:
            raise ConfigError(f"{key}: {path} cannot be read: {error.strerror}") from None


def _check_secret(sink: SinkConfig, key: str, value: str) -> None:
    """What can be said of a secret without telling it."""
    if key == "token" or key.startswith("headers."):
        _check_header(key, value)
    elif key == "connection_string":
        _check_connection_string(value, sink.event_hub.hub if sink.event_hub else None)
    elif key == "url":
        _check_url(sink, value)


def _check_header(key: str, value: str) -> None:
    wrong = next((place for place, letter in enumerate(value, start=1) if not " " <= letter <= "\xff"), None)
    if wrong is not None or value != value.strip():
        where = f"its character {wrong}" if wrong else "the space around it"
        raise ConfigError(f"{key}: expected one line of plain letters, as a header takes them: see {where}")


def _check_connection_string(value: str, hub: str | None) -> None:
    parts = {name.strip().lower() for name, equals, text in (part.partition("=") for part in value.split(";")) if text}
    signed = {"sharedaccesskeyname", "sharedaccesskey"} <= parts or "sharedaccesssignature" in parts
    if "endpoint" not in parts or not signed:
        raise ConfigError(
            "connection_string: expected Endpoint=sb://NAMESPACE/;SharedAccessKeyName=NAME;SharedAccessKey=KEY;EntityPath=HUB"
        )
    if "entitypath" not in parts and not hub:
        raise ConfigError("connection_string: it names no hub: expected `hub`, or EntityPath=HUB in it")


def _check_url(sink: SinkConfig, value: str) -> None:
    try:
        url = urlsplit(value)
        _ = url.port
    except ValueError:
        raise ConfigError("url: this is no address: what is special in a password is written as %XX") from None
    if sink.kind in ("webhook", "slack") and (url.scheme not in ("http", "https") or not url.hostname):
        raise ConfigError("url: expected http://HOST or https://HOST")
    if sink.kind == "email" and url.scheme not in ("mailto", "mailtos"):
        raise ConfigError("url: expected mailto://USER:PASSWORD@HOST or mailtos://USER:PASSWORD@HOST")
    if sink.kind == "webhook" and url.username is not None:
        raise ConfigError("url: user and password do not belong in the address: give them as `headers`")
