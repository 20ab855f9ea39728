"""YAML, environment and command line -> ``Config``: frozen, complete, every mistake named with file, line and path.

A secret may stand under its key, or be found: ``url_file``, ``url_env``, ``url_credential``. It never prints.

Later wins: defaults, the file, ``NOTBEFORE_SECTION__KEY`` in the environment, the command line. An empty file is a
working agent.
"""

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from notbefore.config.checks import Trial, check_otlp, check_sinks
from notbefore.config.model import Config
from notbefore.config.normalize import prepared
from notbefore.config.otel_variables import asked, fold
from notbefore.config.secret import Secret
from notbefore.config.sinks import Otlp, SinkConfig, otlp_headers
from notbefore.config.yaml_file import convert, read
from notbefore.errors import ConfigError

ENVIRONMENT_PREFIX: Final = "NOTBEFORE_"


def load(
    path: Path | None,
    environment: Mapping[str, str],
    overrides: Mapping[str, str | None],
    *,
    sending: bool = True,
    trial: Trial | None = None,
) -> Config:
    """Read the configuration; raises ``ConfigError``.

    ``overrides`` are the command line's, by dotted path (``imds.endpoint``); ``None`` is "not given". Who is not
    ``sending`` needs neither the sinks' libraries nor their secrets, and may have none. ``trial`` is asked of each sink
    what only its library can say; the agent gives none, which would import it for good.
    """
    values, places = read(path) if path is not None else ({}, {})
    base = path.absolute().parent if path is not None else Path.cwd()
    # the file is read strictly on its own first: only there is 1 no text
    _convert(prepared(values, base), places, strict=True)
    for name, text in sorted(environment.items()):
        keys = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
        if name.startswith(ENVIRONMENT_PREFIX) and len(keys) > 1:
            _put(values, keys, text, name)
            places[".".join(keys)] = name
    for dotted, value in overrides.items():
        if value is not None:
            _put(values, dotted.split("."), value, "the command line")
            places[dotted] = "the command line"
    if "otlp" not in values and otlp_trouble(environment) is not None:
        environment = {**environment, "OTEL_SDK_DISABLED": "true"}  # `warnings` says so
    fold(values, places, environment)
    config = _convert(prepared(values, base), places, strict=False)
    if sending:
        check_sinks(config, places, environment, trial=trial)
        check_otlp(config.otlp, places, environment)
    return config


def otlp_trouble(environment: Mapping[str, str]) -> str | None:
    """Why the variables, where they alone ask for OTLP, cannot be used.

    They are often set for a whole machine, with other programs in mind: that is no reason not to watch.
    """
    if not asked(environment):
        return None
    try:
        values: dict[str, Any] = {}
        places: dict[str, str] = {}
        fold(values, places, environment)
        check_otlp(convert(values["otlp"], Otlp, places, strict=False, above="otlp"), places, environment)
    except ConfigError as error:
        return str(error)
    return None


def plain_secrets(config: Config) -> list[str]:
    """The keys under which a secret stands as plain text."""
    return [
        f"sinks.{name}.{sink.kind}.{key}"
        for name, sink in config.sinks.items()
        for key, secret in sink.secrets.items()
        if secret.source == "inline"
    ] + [path for path, secret in otlp_headers(config.otlp).items() if secret.source == "inline"]


def warnings(config: Config, path: Path | None) -> list[str]:
    """What is not wrong, but ought to be known."""
    trouble = otlp_trouble(os.environ) if config.otlp is None else None
    found = [f"OTEL_* variables ask for OTLP, and cannot be used: nothing is sent ({trouble})"] if trouble else []
    found += [f"no route leads to sink {name}: nothing is sent there" for name in _unused(config)]
    plain = plain_secrets(config)
    if plain and path is not None and path.stat().st_mode & stat.S_IROTH:
        found.append(
            f"{path} can be read by everybody, and holds secrets ({', '.join(plain)}): chmod o-r, or use *_file"
        )
    return found


def _unused(config: Config) -> list[str]:
    led = {name for route in config.routes for name in route.sinks}
    heartbeats = {name for name, sink in config.sinks.items() if sink.event_hub and sink.event_hub.heartbeat}
    return [name for name in config.sinks if name not in led | heartbeats] if config.routes else []


def dump(config: Config) -> str:
    """The configuration in use as YAML, for ``check-config``."""
    import yaml  # noqa: PLC0415 - half a megabyte that an agent without a file does not need

    values = msgspec.to_builtins(config, enc_hook=_encode)
    for name, sink in values["sinks"].items():
        values["sinks"][name] = {kind: settings for kind, settings in sink.items() if settings is not None}
    if config.otlp is None:
        del values["otlp"]  # empty, it would be wrong
    return yaml.safe_dump(values, sort_keys=False)


def files(config: Config) -> list[str]:
    """Secrets, certificates and keys that it names; those of its web configuration are not among them."""
    return list(_files(msgspec.to_builtins(config, enc_hook=_encode)))


def _files(values: object) -> Iterator[str]:
    for key, value in values.items() if isinstance(values, dict) else ():
        if isinstance(value, str) and (key == "file" or key.endswith("_file")):
            yield value
        else:
            yield from _files(value)


def _encode(value: object) -> object:
    return value.shown() if isinstance(value, Secret) else str(value)


def _put(values: dict[str, Any], keys: list[str], text: str, origin: str) -> None:
    for key in keys[:-1]:
        section = values.setdefault(key, {})
        if not isinstance(section, dict):
            raise ConfigError(f"{origin}: {key} is not a section")
        values = section
    values[keys[-1]] = text


def _convert(values: dict[str, Any], places: dict[str, str], *, strict: bool) -> Config:
    if isinstance(values.get("sinks"), dict):
        for name, sink in values["sinks"].items():  # one by one: the errors of a mapping do not name its key
            convert(sink, SinkConfig, places, strict=strict, above=f"sinks.{name}")
    return convert(values, Config, places, strict=strict)
