"""YAML, environment and command line -> ``Config``, frozen and complete.

Mistakes name file, line, column and key.

A secret is given under its key, or by reference: ``url_file``, ``url_env``, ``url_credential``. It
is never printed.

The order is: defaults, the file, ``NOTBEFORE_SECTION__KEY`` in the environment, the command line;
later ones win. An empty file gives a working agent. ``warnings`` reports values that are valid, but
probably not intended.
"""

import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from notbefore.config.hub_routes import without_peers
from notbefore.config.model import Config, Otlp
from notbefore.config.otel import resolved
from notbefore.config.reading import Reader
from notbefore.config.secret import secrets_in
from notbefore.config.shown import meant, shown
from notbefore.config.sinks import EventHub, OtlpConnection, SinkSettings, check_installed
from notbefore.config.yaml_file import Places, Variable, read
from notbefore.core.approval import unknown_words
from notbefore.core.change import APPROVAL_KINDS, SILENT
from notbefore.core.routing import EventMatch, Match, Route, Terms
from notbefore.core.text import one_of
from notbefore.errors import ConfigError, ConfigPlace, Mistake

ENVIRONMENT_PREFIX: Final = "NOTBEFORE_"
Finding = tuple[str, str]  # the path of a key, and a warning about it
# an address without a part that could be a key
NO_KEY: Final = re.compile(r"https?://[^/?#@]+(?:/[^/?#]{0,16})*")


def load(
    path: Path | None,
    environment: Mapping[str, str],
    overrides: Mapping[str, str | None],
    *,
    sending: bool = True,
) -> Config:
    """Read the configuration; raises ``ConfigError`` with all its mistakes.

    ``overrides``: values of the command line by dotted path (``imds.endpoint``); ``None`` means
    "not given". A caller that is not ``sending`` needs neither the libraries nor the secrets of the
    sinks.
    """
    config, _, mistakes = examine(path, environment, overrides, sending=sending)
    if mistakes:
        raise ConfigError.of(mistakes)
    return config


def examine(
    path: Path | None,
    environment: Mapping[str, str],
    overrides: Mapping[str, str | None],
    *,
    sending: bool = True,
) -> tuple[Config, Places, list[Mistake]]:
    """Return the valid part of the configuration, the place of each key, and the mistakes.

    Raises if it is not YAML.

    The parameters are those of ``load``.
    """
    base = path.absolute().parent if path is not None else Path.cwd()
    values, places = _given(path, environment, overrides)
    # also those with mistakes
    sinks = list(values["sinks"]) if isinstance(values.get("sinks"), dict) else []

    def wrong(at: str, made: Any) -> Iterator[str]:
        if not sending:
            return
        if isinstance(made, SinkSettings) and not at.startswith("fleet"):
            try:
                check_installed(_with_variables(made, environment))
            except ConfigError as error:
                yield str(error)
        if isinstance(made, EventHub) and not made.hub and made.connection_string is not None:
            named = "entitypath=" in made.connection_string.reveal(environment).lower()
            if not named:
                yield "connection_string: expected EntityPath=HUB in it, or the key `hub` beside it"

    reader = Reader(places, base, environment if sending else None, wrong)
    config: Config = reader.read(values, Config)
    reader.mistakes.extend(_unknown_sinks(values, sinks, places))
    return config, places, reader.mistakes


def _with_variables(settings: SinkSettings, environment: Mapping[str, str]) -> SinkSettings:
    """Return the settings with what the standard variables of OpenTelemetry add."""
    if isinstance(settings, Otlp):
        return resolved(settings, "metrics", environment)
    if isinstance(settings, OtlpConnection):
        return resolved(settings, "logs", environment)
    return settings


def _unknown_sinks(
    values: Mapping[str, Any], sinks: Collection[str], places: Places
) -> Iterator[Mistake]:
    """Yield a mistake for each name in a route that is no sink, also in a route with others."""
    routes = values.get("routes")
    if not isinstance(routes, list):
        return
    for number, route in enumerate(routes):
        if not isinstance(route, dict):
            continue
        for key in ("sinks", "fallback"):
            path = f"routes[{number}].{key}"
            names = route.get(key)
            if isinstance(names, str):
                names = [names]
            if not isinstance(names, list):
                continue
            for name in names:
                if isinstance(name, str) and name not in sinks:
                    hint = one_of(shown(name), sinks) if sinks else ": write it under `sinks`"
                    text = f"there is no sink {shown(name)!r}{hint}"
                    yield Mistake(places.nearest(path), path, text)


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
    *sections, last = keys
    for number, key in enumerate(sections):
        sections[number] = _spelt(key, values)
        section = values.setdefault(sections[number], {})
        if not isinstance(section, dict):
            raise ConfigError(f"{shown(origin)}: {shown(key)} is not a section")
        values = section
    last = _spelt(last, values)
    values[last] = Variable(text)
    places[".".join(map(meant, [*sections, last]))] = ConfigPlace(shown(origin))


def _spelt(key: str, values: Mapping[str, Any]) -> str:
    """Return the key as the file spells it: a variable has capitals alone."""
    return key if key in values else next((one for one in values if one.lower() == key), key)


def warnings(config: Config, places: Places) -> list[str]:
    """Return one text for each finding. ``places``: where each key was given."""
    found = [*_of_sinks(config), *_of_state(config, places), *_plain_secrets(config, places)]
    for number, route in enumerate(config.routes):
        found += [
            (f"routes[{number}].{key}", text)
            for key, text in _of_route(route, config.routing.sinks, fleet=bool(config.fleet))
        ]
        found += _unreached(number, config.routes)
    for word in config.messages.advice:
        texts = unknown_words(EventMatch(event_type=(word,)))
        found += [
            (f"messages.advice.{word}", f"{text}. No message contains this text")
            for _, text in texts
        ]
    if config.fleet is None:
        found += _of_hub_routes(config)
    else:
        found += [
            (key, "only the agent uses this")
            for key in ("approval", "heartbeat", "otlp")
            if key in places
        ]
    return [
        *_misspelt_variables(os.environ),
        *_writable(_files_of(config, places)),
        *(str(Mistake(places.nearest(key), key, text)) for key, text in found),
    ]


def _of_sinks(config: Config) -> Iterator[Finding]:
    used = {name for route in config.routes for name in (*route.sinks, *route.fallback)}
    for name, sink in config.sinks.items():
        heartbeats = sink.event_hub is not None and sink.event_hub.heartbeat
        if config.routes and name not in used and not heartbeats:
            text = (
                f"no route leads to the sink {name}, so nothing is sent there: name it under"
                " `routes`"
            )
            yield f"sinks.{name}", text
        if sink.email is not None and sink.email.tls == "none" and sink.email.password is not None:
            yield (
                f"sinks.{name}.email.tls",
                "the password is sent unencrypted: write `tls: starttls` or `tls: tls`",
            )
        program = sink.command.command[0] if sink.command is not None else None
        # ``shutil.which`` does the same, but its import costs every agent 0.5 MiB
        if program is not None and not (Path(program).is_file() and os.access(program, os.X_OK)):
            hint = (
                "write a list, [PROGRAM, ARGUMENT]" if " " in program else "install it, or chmod +x"
            )
            yield (
                f"sinks.{name}.command.command",
                f"{program} is no program that can be run: {hint}",
            )


def _plain_secrets(config: Config, places: Places) -> Iterator[Finding]:
    """Yield each key whose secret is plain text in the file, except webhook addresses that contain
    no key.
    """
    text = (
        "this secret is plain text in the file: write it to /etc/notbefore/credentials/NAME, which"
        " only root can read, and refer to it: KEY_credential: NAME (for a header {credential:"
        " NAME}), or KEY_file"
    )
    for key, secret in secrets_in(config).items():
        no_key = key.endswith(".webhook.url") and NO_KEY.fullmatch(secret.reveal())
        if secret.source == "inline" and places.nearest(key).line and not no_key:
            yield key, text


def _of_hub_routes(config: Config) -> Iterator[Finding]:
    """Yield the routes by which an event hub gets no events of other VMs."""
    for number, hub in without_peers(config.routing):
        way = config.routes[number]
        key = "sinks"
        advice = "name the hub in the earlier route that matches them"
        if way.match.scope and "peer" not in way.match.scope:
            key = "match.scope"
            advice = "leave out `scope`"
        elif way.announce_by == "affected":
            key = "announce_by"
            advice = "write `announce_by: all`"
        text = (
            f"the events of other VMs do not reach the event hub {hub}. A VM that a Preempt or a"
            " Terminate deletes cannot report the end, so the event stays open in the fleet:"
        )
        yield f"routes[{number}].{key}", f"{text} {advice}"


def _of_route(route: Route, sinks: Mapping[str, Terms], *, fleet: bool) -> Iterator[Finding]:
    """Yield the matchers of a route that no change can match, and a fallback that gets nothing."""
    match = route.match
    if fleet:  # only the fleet has this type
        types = tuple(one for one in match.event_type if one.casefold() != SILENT.casefold())
        match = msgspec.structs.replace(match, event_type=types)
    for key, text in unknown_words(match):
        yield f"match.{key}", f"{text}. No event matches it"
    approvals = set(match.change) & set(APPROVAL_KINDS)
    announce_by = {sinks[name].announce_by(route) for name in route.sinks}
    if match.scope == ("peer",) and announce_by != {"all"} and not approvals and not fleet:
        text = (
            "with `announce_by: affected` a VM notifies only of events that affect it, and these"
            " do not"
        )
        yield "match.scope", f"{text}: write `announce_by: all`"
    if route.fallback and set(route.fallback) <= set(route.sinks):
        yield "fallback", "these sinks get the change in any case: name one that is not in `sinks`"


def _unreached(number: int, routes: Sequence[Route]) -> Iterator[Finding]:
    """Yield a warning if an earlier route takes every change that a route matches."""
    for earlier, route in enumerate(routes[:number]):
        if not route.go_on and _covers(route.match, routes[number].match):
            text = f"routes[{earlier}] takes all that this route matches: write `continue: true`"
            yield f"routes[{number}]", f"{text} there, or change the order"
            return


def _covers(wide: Match, narrow: Match) -> bool:
    """Whether everything that ``narrow`` matches is certainly matched by ``wide``."""
    if wide.duration not in (None, narrow.duration):
        return False
    for tag, values in wide.tags.items():
        if tag not in narrow.tags or not _contains(values, narrow.tags[tag]):
            return False
    for field in msgspec.structs.fields(Match):
        if field.name in ("duration", "tags"):
            continue
        if not _contains(getattr(wide, field.name), getattr(narrow, field.name)):
            return False
    return True


def _contains(wide: Sequence[str], narrow: Sequence[str]) -> bool:
    """Whether the words of a matcher contain those of another; none at all match everything."""
    if not wide:
        return True
    words = {word.casefold() for word in wide}
    return bool(narrow) and words >= {word.casefold() for word in narrow}


def _of_state(config: Config, places: Places) -> Iterator[Finding]:
    """Yield a warning if this user cannot create or write the state directory."""
    if "state.dir" not in places:
        return
    place = nearest_existing(Path(config.state.dir))
    if place.is_dir() and not os.access(place, os.W_OK | os.X_OK):
        yield "state.dir", f"this user cannot write {place}: the agent's own user has to"


def nearest_existing(path: Path) -> Path:
    """Return the path, or the nearest directory above it that exists."""
    for place in (path, *path.absolute().parents):
        if place.exists():
            return place
    return path


def _misspelt_variables(environment: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(environment):
        section, _, key = name.removeprefix(ENVIRONMENT_PREFIX).lower().partition("_")
        kind = next(
            (field.type for field in msgspec.structs.fields(Config) if field.name == section), None
        )
        if name.startswith(ENVIRONMENT_PREFIX) and key in getattr(kind, "__struct_fields__", ()):
            meant = f"{ENVIRONMENT_PREFIX}{section}__{key}".upper()
            yield (
                f"{name}: this variable is ignored: two underscores stand after the section,"
                f" {meant}"
            )


def _files_of(config: Config, places: Places) -> Iterator[Path]:
    """Yield the files that the configuration consists of, and those that it names."""
    if "" in places:
        yield Path(places[""].origin)
    names = [config.server.web_config_file]
    if config.fleet is not None:
        names.append(config.fleet.inventory_file)
    for settings in _connections(config):
        names += [getattr(settings, key, None) for key in ("ca_file", "cert_file", "key_file")]
    for sink in config.sinks.values():
        if sink.command is not None:
            names.append(sink.command.command[0])
    for name in names:
        if name is not None:
            yield Path(name)
    for secret in secrets_in(config).values():
        secret_file = secret.file()
        if secret_file is not None:
            yield secret_file


def _connections(config: Config) -> list[SinkSettings]:
    """Return the settings of all connections, whatever they are for."""
    connections = [sink.settings for sink in config.sinks.values()]
    if config.fleet is not None:
        connections.append(config.fleet.hub)
    if config.otlp is not None:
        connections.append(config.otlp)
    return connections


def _writable(files: Iterable[Path]) -> Iterator[str]:
    """Yield a warning for each file that every user may write.

    A missing file is an error elsewhere.
    """
    if not hasattr(os, "geteuid"):  # Windows has access lists
        return
    for file in dict.fromkeys(files):
        if file.exists() and file.stat().st_mode & stat.S_IWOTH:
            yield (
                f"{file} can be written by every user of this machine: who writes it decides which"
                " commands the agent runs, where it sends, and who may read from it: chmod o-w"
                f" {file}"
            )
