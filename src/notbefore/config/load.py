"""``load`` reads the configuration: YAML, environment and command line -> ``Config``.

Later sources win: defaults, file, ``NOTBEFORE_SECTION__KEY`` in the environment, command line. An
empty file gives a working agent. Each mistake names file, line, column and key.

A secret stands under its key, or is referred to: ``url_file``, ``url_env``, ``url_credential``. It
is never printed.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from msgspec import Struct

from notbefore.config.addresses import not_public
from notbefore.config.extras import check_installed
from notbefore.config.model import Config, Otlp
from notbefore.config.otel import resolved
from notbefore.config.reading import Reader
from notbefore.config.shown import meant, shown
from notbefore.config.sinks import EventHub, Kubernetes, OtlpConnection, SinkSettings, Webhook
from notbefore.config.yaml_file import Places, Variable, read
from notbefore.core.text import one_of
from notbefore.errors import ConfigError, ConfigPlace, Mistake

ENVIRONMENT_PREFIX: Final = "NOTBEFORE_"


def load(
    path: Path | None,
    environment: Mapping[str, str],
    overrides: Mapping[str, str | None],
    *,
    sending: bool = True,
) -> Config:
    """Read the configuration; raises ``ConfigError`` with all its mistakes.

    ``overrides``: values of the command line by dotted path (``imds.endpoint``); ``None`` if it has
    none. A caller that is not ``sending`` needs neither the libraries nor the secrets of the sinks.
    """
    examination = examine(path, environment, overrides, sending=sending)
    if examination.mistakes:
        raise ConfigError.of(examination.mistakes)
    return examination.config


class Examination(NamedTuple):
    """The valid part of a configuration, the place of each key, and the mistakes."""

    config: Config
    places: Places
    mistakes: list[Mistake]


def examine(
    path: Path | None,
    environment: Mapping[str, str],
    overrides: Mapping[str, str | None],
    *,
    sending: bool = True,
) -> Examination:
    """Read the configuration, and find all its mistakes; raises ``ConfigError`` if it is not YAML.

    The parameters are those of ``load``.
    """
    directory = Path.cwd()
    if path is not None:
        directory = path.absolute().parent

    values, places = _merged(path, environment, overrides)
    if sending:
        checks = _SinkChecks(environment)
        reader = Reader(places, directory, environment, checks.mistakes)
    else:  # without the environment it reads no secrets
        reader = Reader(places, directory)
    config: Config = reader.read(values, Config)
    reader.mistakes.extend(_unknown_sinks(values, places))
    return Examination(config, places, reader.mistakes)


class _SinkChecks(Struct, frozen=True):
    """Checks of connections that need more than the values of their keys."""

    environment: Mapping[str, str]

    def mistakes(self, path: str, settings: Struct) -> Iterator[str]:
        """Yield the mistakes of a struct at a path."""
        # a fleet checks its own library at its start
        if isinstance(settings, SinkSettings) and not path.startswith("fleet"):
            try:
                check_installed(_with_variables(settings, self.environment))
            except ConfigError as error:
                yield str(error)
        if isinstance(settings, EventHub) and self._names_no_hub(settings):
            yield "connection_string: expected EntityPath=HUB in it, or the key `hub` next to it"
        if isinstance(settings, Webhook) and not settings.allow_private:
            reason = self._why_private(settings)
            if reason:
                yield f"url: {reason}"
        if isinstance(settings, Kubernetes):
            yield from self._unset_variables(settings)

    def _unset_variables(self, settings: Kubernetes) -> Iterator[str]:
        """Yield a mistake for each variable that a pod has, and this process needs but lacks."""
        for read_variable in (settings.api_server, settings.node):
            try:
                read_variable(self.environment)
            except ConfigError as error:
                yield str(error)

    def _why_private(self, settings: Webhook) -> str:
        """Return why no message may be sent to a webhook's address; an empty text if one may.

        Host names are not resolved: that would need a connection.
        """
        host = urlsplit(settings.url.reveal(self.environment)).hostname or ""
        host = host.removesuffix(".")
        if host == "localhost" or host.endswith(".localhost"):
            host = "127.0.0.1"
        try:
            return not_public(host)
        except ValueError:  # a host name
            return ""

    def _names_no_hub(self, settings: EventHub) -> bool:
        if settings.hub or settings.connection_string is None:
            return False
        return "entitypath=" not in settings.connection_string.reveal(self.environment).lower()


def _with_variables(settings: SinkSettings, environment: Mapping[str, str]) -> SinkSettings:
    """Return the settings with what the standard variables of OpenTelemetry add."""
    if isinstance(settings, Otlp):
        return resolved(settings, "metrics", environment)
    if isinstance(settings, OtlpConnection):
        return resolved(settings, "logs", environment)
    return settings


def _unknown_sinks(values: Mapping[str, Any], places: Places) -> Iterator[Mistake]:
    """Yield a mistake for each name in a route that is no sink.

    The values were not converted: a route and a sink may have other mistakes too.
    """
    sinks = values.get("sinks")
    names_of_sinks: list[str] = []
    if isinstance(sinks, dict):
        names_of_sinks = list(sinks)
    for path, name in _names_in_routes(values.get("routes")):
        if name not in names_of_sinks:
            hint = ": write it under `sinks`"
            if names_of_sinks:
                hint = one_of(shown(name), names_of_sinks)
            text = f"there is no sink {shown(name)!r}{hint}"
            yield Mistake(places.nearest(path), path, text)


def _names_in_routes(routes: object) -> Iterator[tuple[str, str]]:
    """Yield each name of a sink in the routes, after the path of its key."""
    if not isinstance(routes, list):
        return
    for index, route in enumerate(routes):
        if not isinstance(route, dict):
            continue
        for key in ("sinks", "fallback"):
            names = route.get(key)
            if isinstance(names, str):
                names = [names]
            if not isinstance(names, list):
                continue
            for name in names:
                if isinstance(name, str):
                    yield f"routes[{index}].{key}", name


def _merged(
    path: Path | None, environment: Mapping[str, str], overrides: Mapping[str, str | None]
) -> tuple[dict[str, Any], Places]:
    """Return the values of the file, the environment and the command line, and their places."""
    values: dict[str, Any] = {}
    places = Places()
    if path is not None:
        values, places = read(path)

    for name, text in sorted(environment.items()):
        keys = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
        if name.startswith(ENVIRONMENT_PREFIX) and len(keys) > 1:
            _put(values, places, keys, text, shown(name))

    for dotted, value in overrides.items():
        if value is not None:
            _put(values, places, dotted.split("."), value, "the command line")
    return values, places


def _put(values: dict[str, Any], places: Places, keys: list[str], text: str, origin: str) -> None:
    """Set a value, in sections that are made if they do not exist."""
    *names_of_sections, last_key = keys
    section = values
    path: list[str] = []
    for key in names_of_sections:
        name = _as_spelled(key, section)
        path.append(name)
        section = section.setdefault(name, {})
        if not isinstance(section, dict):
            raise ConfigError(f"{origin}: {shown(key)} is not a section")

    name = _as_spelled(last_key, section)
    path.append(name)
    section[name] = Variable(text)
    dotted_path = ".".join(meant(part) for part in path)
    places[dotted_path] = ConfigPlace(origin)


def _as_spelled(key: str, section: Mapping[str, Any]) -> str:
    """Return a key in the case that the file uses: names of variables have only capitals."""
    if key in section:
        return key
    for name in section:
        if name.lower() == key:
            return name
    return key
