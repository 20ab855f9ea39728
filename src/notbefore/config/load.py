"""YAML, environment and command line -> ``Config``: frozen and complete. Errors name file, line and key.

A secret stands under its key, or elsewhere: ``url_file``, ``url_env``, ``url_credential``. It is never printed.

Later wins: defaults, the file, ``NOTBEFORE_SECTION__KEY`` in the environment, the command line. An empty file is a
working agent.
"""

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from notbefore.config.checks import Trial, check_otlp, check_otlp_installed, check_sinks
from notbefore.config.model import Config
from notbefore.config.normalize import prepared
from notbefore.config.otel_variables import Variables, fold
from notbefore.config.secret import Secret
from notbefore.config.sinks import SinkConfig, otlp_headers
from notbefore.config.yaml_file import read, to_struct
from notbefore.core.approval import unknown_words
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

    ``overrides`` are those of the command line, by dotted path (``imds.endpoint``); ``None`` is "not given". A caller
    that is not ``sending`` needs neither the libraries nor the secrets of the sinks. ``trial`` makes each sink, for
    checks that only its library can do; the agent gives none, because the library would stay in its memory.
    """
    values, places = read(path) if path is not None else ({}, {})
    base = path.absolute().parent if path is not None else Path.cwd()
    # strictly, for the file alone: there `name: 1` is a mistake. A variable of the environment is always text
    _to_config(prepared(values, base), places, strict=True)
    for name, text in sorted(environment.items()):
        keys = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
        if name.startswith(ENVIRONMENT_PREFIX) and len(keys) > 1:
            _put(values, keys, text, name)
            places[".".join(keys)] = name
    for dotted, value in overrides.items():
        if value is not None:
            _put(values, dotted.split("."), value, "the command line")
            places[dotted] = "the command line"
    if "otlp" not in values and missing_library(environment) is not None:
        environment = {**environment, "OTEL_SDK_DISABLED": "true"}  # `warnings` says so
    fold(values, places, environment)
    config = _to_config(prepared(values, base), places, strict=False)
    if sending:
        check_sinks(config, places, environment, trial=trial)
        check_otlp(config.otlp, places, environment)
    return config


def missing_library(environment: Mapping[str, str]) -> str | None:
    """Return which library is missing, where the ``OTEL_*`` variables alone configure OTLP; ``None`` if there is none.

    They are often set for a whole machine, for other programs: the agent warns, and runs without OTLP.
    """
    found = Variables(environment, "METRICS")
    try:
        if found.asked:
            check_otlp_installed(found.values.get("protocol", "http/protobuf"))
    except ConfigError as error:
        return str(error)
    return None


def plain_secrets(config: Config) -> list[str]:
    """Return the keys under which a secret stands as plain text."""
    return [
        f"sinks.{name}.{sink.kind}.{key}"
        for name, sink in config.sinks.items()
        for key, secret in sink.secrets.items()
        if secret.source == "inline"
    ] + [path for path, secret in otlp_headers(config.otlp).items() if secret.source == "inline"]


def warnings(config: Config, path: Path | None) -> list[str]:
    """Return what is not an error, but probably not intended; one text each."""
    found = list(_otlp_warnings(config, os.environ))
    found += [f"no route leads to the sink {name}: nothing is sent there" for name in _unused(config)]
    found += [
        f"routes[{number}].match.{key}: {text}: as long as Azure has no such event, the route gets nothing"
        for number, route in enumerate(config.routes)
        for key, text in unknown_words(route.match)
    ]
    for number, route in enumerate(config.routes):
        own = [key for key in ("vm", "zone", "tags") if getattr(route.match, key)]
        if own and route.announce_by == "leader":
            found.append(
                f"routes[{number}]: announce_by: leader beside match.{own[0]}: where the VMs of an event differ in it,"
                " this route may not apply to the leader, and nobody is notified: use announce_by: affected"
            )
    if path is not None and path.stat().st_mode & stat.S_IROTH:
        _, places = read(path)  # a secret may also come from the environment
        plain = [key for key in plain_secrets(config) if key in places]
        if plain:
            found.append(
                f"{path} can be read by every user of this machine, and holds secrets: {', '.join(plain)}. Move each to"
                " a file that only the service may read, and name it: KEY_file, or KEY_credential under systemd"
            )
    return found


def _otlp_warnings(config: Config, environment: Mapping[str, str]) -> Iterator[str]:
    metrics = Variables(environment, "METRICS", config.otlp.protocol if config.otlp is not None else None)
    ignored = metrics.ignored if config.otlp is not None or metrics.meant else []
    logs = [sink.otlp_logs for sink in config.sinks.values() if sink.otlp_logs is not None]
    if logs or (config.otlp is not None and config.otlp.agent_log != "none"):
        ignored = [*ignored, *Variables(environment, "LOGS", logs[0].protocol if logs else None).ignored]
    yield from (f"{text}: this variable is ignored" for text in dict.fromkeys(ignored))
    if config.otlp is None and (missing := missing_library(environment)) is not None:
        yield f"OTEL_* variables ask for OTLP, and nothing is exported: {missing}"


def _unused(config: Config) -> list[str]:
    led = {name for route in config.routes for name in (*route.sinks, *route.fallback)}
    heartbeats = {name for name, sink in config.sinks.items() if sink.event_hub and sink.event_hub.heartbeat}
    return [name for name in config.sinks if name not in led | heartbeats] if config.routes else []


def dump(config: Config) -> str:
    """Return the configuration in use as YAML, without secrets, for ``check-config``."""
    import yaml  # noqa: PLC0415 - half a megabyte that an agent without a file does not need

    values = msgspec.to_builtins(config, enc_hook=_encode)
    for name, sink in values["sinks"].items():
        values["sinks"][name] = {kind: settings for kind, settings in sink.items() if settings is not None}
    if config.otlp is None:
        del values["otlp"]  # empty, it would be wrong
    if config.fleet is None:
        del values["fleet"]
    return yaml.safe_dump(values, sort_keys=False)


def files(config: Config) -> list[str]:
    """Return the paths of the secrets, certificates and keys that it names, without those of its web configuration."""
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


def _to_config(values: dict[str, Any], places: dict[str, str], *, strict: bool) -> Config:
    if isinstance(values.get("sinks"), dict):
        for name, sink in values["sinks"].items():  # one by one: msgspec's errors do not name the sink
            to_struct(sink, SinkConfig, places, strict=strict, above=f"sinks.{name}")
    return to_struct(values, Config, places, strict=strict)
