"""YAML, environment and command line -> ``Config``: frozen and complete. Mistakes name file, line, column and key.

A secret stands under its key, or elsewhere: ``url_file``, ``url_env``, ``url_credential``. It is never printed.

Later wins: defaults, the file, ``NOTBEFORE_SECTION__KEY`` in the environment, the command line. An empty file is a
working agent.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from notbefore.config.model import Config
from notbefore.config.reading import Reader
from notbefore.config.sinks import EventHub, SinkSettings, check_installed
from notbefore.config.yaml_file import Places, Variable, read
from notbefore.core.routing import Route
from notbefore.core.text import one_of
from notbefore.errors import ConfigError, Mistake, Place

ENVIRONMENT_PREFIX: Final = "NOTBEFORE_"


def load(
    path: Path | None, environment: Mapping[str, str], overrides: Mapping[str, str | None], *, sending: bool = True
) -> Config:
    """Read the configuration; raises ``ConfigError`` with all that is wrong with it.

    ``overrides`` are those of the command line, by dotted path (``imds.endpoint``); ``None`` is "not given". A caller
    that is not ``sending`` needs neither the libraries nor the secrets of the sinks.
    """
    config, _, mistakes = examine(path, environment, overrides, sending=sending)
    if mistakes:
        raise ConfigError.of(mistakes)
    return config


def examine(
    path: Path | None, environment: Mapping[str, str], overrides: Mapping[str, str | None], *, sending: bool = True
) -> tuple[Config, Places, list[Mistake]]:
    """Return what is right of the configuration, the place of each key, and what is wrong; raises where it is no YAML.

    The parameters are those of ``load``.
    """
    base = path.absolute().parent if path is not None else Path.cwd()
    values, places = _given(path, environment, overrides)
    sinks = list(values["sinks"]) if isinstance(values.get("sinks"), dict) else []  # mistaken ones as well

    def wrong(at: str, made: Any) -> Iterator[str]:
        if not sending:
            return
        if isinstance(made, SinkSettings) and not at.startswith("fleet"):
            try:
                check_installed(made)
            except ConfigError as error:
                yield str(error)
        if isinstance(made, EventHub) and not made.hub and made.connection_string is not None:
            named = "entitypath=" in made.connection_string.reveal(environment).lower()
            yield from (
                () if named else ("connection_string: expected EntityPath=HUB in it, or the key `hub` beside it",)
            )
        if isinstance(made, Route):
            for key, names in (("sinks", made.sinks), ("fallback", made.fallback)):
                for name in (one for one in names if one not in sinks):
                    known = one_of(name, sinks) if sinks else ": write it under `sinks`"
                    yield f"{key}: there is no sink {name!r}{known}"

    reader = Reader(places, base, environment if sending else None, wrong)
    config: Config = reader.read(values, Config)
    return config, places, reader.mistakes


def _given(
    path: Path | None, environment: Mapping[str, str], overrides: Mapping[str, str | None]
) -> tuple[dict[str, Any], Places]:
    values, places = read(path) if path is not None else ({}, Places())
    for name, text in sorted(environment.items()):
        keys = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
        if name.startswith(ENVIRONMENT_PREFIX) and len(keys) > 1:
            _put(values, places, keys, text, name)
    for dotted, value in overrides.items():
        if value is not None:
            _put(values, places, dotted.split("."), value, "the command line")
    return values, places


def _put(values: dict[str, Any], places: Places, keys: list[str], text: str, origin: str) -> None:
    for key in keys[:-1]:
        section = values.setdefault(key, {})
        if not isinstance(section, dict):
            raise ConfigError(f"{origin}: {key} is not a section")
        values = section
    values[keys[-1]] = Variable(text)
    places[".".join(keys)] = Place(origin)
