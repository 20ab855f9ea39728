"""YAML, environment and command line -> ``Config``: frozen and complete. Errors name file, line and key.

A secret stands under its key, or elsewhere: ``url_file``, ``url_env``, ``url_credential``. It is never printed.

Later wins: defaults, the file, ``NOTBEFORE_SECTION__KEY`` in the environment, the command line. An empty file is a
working agent.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from notbefore.config.checks import (
    Trial,
    check_families,
    check_fleet,
    check_heartbeat,
    check_otlp,
    check_otlp_installed,
    check_sinks,
)
from notbefore.config.model import Config
from notbefore.config.normalize import prepared
from notbefore.config.otel_variables import Variables, fold
from notbefore.config.secret import Secret
from notbefore.config.sinks import SinkConfig
from notbefore.config.yaml_file import read, to_struct
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
    _to_config(prepared(values, Config, base), places, strict=True)
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
    config = _to_config(prepared(values, Config, base), places, strict=False)
    check_families(config.exposition.families.exclude, places)
    if sending:
        check_sinks(config, places, environment, trial=trial)
        check_otlp(config.otlp, places, environment)
        check_fleet(config.fleet, places, environment)
        check_heartbeat(config, places, environment)
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


def values(config: Config) -> dict[str, Any]:
    """Return the configuration in use, without secrets, for ``check-config``."""
    found: dict[str, Any] = msgspec.to_builtins(config, enc_hook=_encode)
    for name, sink in found["sinks"].items():
        found["sinks"][name] = {kind: settings for kind, settings in sink.items() if settings is not None}
    return {section: value for section, value in found.items() if value is not None}


def dump(config: Config) -> str:
    """Return ``values`` as YAML."""
    import yaml  # noqa: PLC0415 - half a megabyte that an agent without a file does not need

    return yaml.safe_dump(values(config), sort_keys=False)


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
