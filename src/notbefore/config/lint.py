"""``warnings`` finds values that are valid, but probably not what the user wants."""

import os
import re
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from notbefore.config.hub_routes import without_peers
from notbefore.config.load import ENVIRONMENT_PREFIX
from notbefore.config.model import Config
from notbefore.config.regular_file import status_of
from notbefore.config.secret import secrets_in
from notbefore.config.sinks import Messages, SinkConfig, SinkSettings
from notbefore.config.yaml_file import Places
from notbefore.core.approval import unknown_words
from notbefore.core.change import APPROVAL_KINDS, SILENT
from notbefore.core.routing import EventMatch, Match, Route
from notbefore.errors import Mistake

# an address without a part that could be a key
NO_KEY: Final = re.compile(r"https?://[^/?#@]+(?:/[^/?#]{0,16})*")
# headers whose values are no secrets, in lower case
PUBLIC_HEADERS: Final = frozenset({"accept", "content-type", "user-agent", "x-scope-orgid"})
IN_PLAIN_TEXT: Final = (
    "this secret is plain text in the file: write it to /etc/notbefore/credentials/NAME, which"
    " only root can read, and refer to it: KEY_credential: NAME (for a header {credential: NAME}),"
    " or KEY_file"
)
# bytes: with `/control.sock` it is as long as the path of a Unix socket may be on Linux
MAX_STATE_DIR: Final = 94


class Finding(NamedTuple):
    """A warning about the value of a key."""

    key: str  # its dotted path
    text: str


def warnings(config: Config, places: Places) -> list[str]:
    """Return the texts of all warnings. ``places``: the place of each key."""
    texts = [*_misspelled_variables(os.environ), *_writable(_files_of(config, places))]
    for key, text in _findings(config, places):
        texts.append(str(Mistake(places.nearest(key), key, text)))
    return texts


def _findings(config: Config, places: Places) -> Iterator[Finding]:
    for name, sink in config.sinks.items():
        yield from _of_sink(name, sink, config)
    yield from _of_state(config, places)
    yield from _plain_secrets(config, places)
    for index, route in enumerate(config.routes):
        yield from _of_route(f"routes[{index}]", route, config)
        yield from _unreached(index, config.routes)
    yield from _of_advice(config.messages)
    if config.fleet is None:
        yield from _of_hub_routes(config)
    else:
        yield from _unused_by_fleet(places)


def _of_sink(name: str, sink: SinkConfig, config: Config) -> Iterator[Finding]:
    sends_heartbeats = sink.event_hub is not None and sink.event_hub.heartbeat
    if config.routes and not sends_heartbeats and not _is_used(name, config.routes):
        text = (
            f"no route leads to the sink {name}, so nothing is sent there: name it under `routes`"
        )
        yield Finding(f"sinks.{name}", text)

    email = sink.email
    if email is not None and email.tls == "none" and email.password is not None:
        text = "the password is sent unencrypted: write `tls: starttls` or `tls: tls`"
        yield Finding(f"sinks.{name}.email.tls", text)

    if sink.kubernetes is not None and config.fleet is not None:
        text = "only the agent on a node uses this sink: a fleet has no node"
        yield Finding(f"sinks.{name}.kubernetes", text)

    if sink.command is not None:
        program = sink.command.command[0]
        if shutil.which(program) is None:
            advice = "install it, or chmod +x"
            if " " in program:
                advice = "write a list, [PROGRAM, ARGUMENT]"
            text = f"{program} cannot be run as a program: {advice}"
            yield Finding(f"sinks.{name}.command.command", text)


def _is_used(sink: str, routes: Iterable[Route]) -> bool:
    return any(sink in route.sinks or sink in route.fallback for route in routes)


def _plain_secrets(config: Config, places: Places) -> Iterator[Finding]:
    """Yield each key whose secret is plain text in the file.

    Public headers and webhook addresses without a key are no secrets.
    """
    for key, secret in secrets_in(config).items():
        is_in_file = secret.source == "inline" and places.nearest(key).line > 0
        has_no_key = key.endswith(".webhook.url") and NO_KEY.fullmatch(secret.reveal())
        header = key.partition(".headers.")[2]
        is_public = header.lower() in PUBLIC_HEADERS
        if is_in_file and not has_no_key and not is_public:
            yield Finding(key, IN_PLAIN_TEXT)


def _of_hub_routes(config: Config) -> Iterator[Finding]:
    """Yield the routes that give an event hub no events of other VMs."""
    for index, hub in without_peers(config.routing):
        route = config.routes[index]
        key = "sinks"
        advice = "name the hub in the earlier route that matches them"
        if route.match.scope and "peer" not in route.match.scope:
            key = "match.scope"
            advice = "leave out `scope`"
        elif route.announce_by == "affected":
            key = "announce_by"
            advice = "write `announce_by: all`"
        text = (
            f"the events of other VMs do not reach the event hub {hub}. A VM that a Preempt or a"
            " Terminate deletes cannot report the end, so the event stays open in the fleet:"
        )
        yield Finding(f"routes[{index}].{key}", f"{text} {advice}")


def _of_route(path: str, route: Route, config: Config) -> Iterator[Finding]:
    """Yield the matchers of a route that no change can match, and a fallback that gets nothing."""
    match = route.match
    if config.fleet is not None:  # only the fleet has this type
        types = [name for name in match.event_type if name.casefold() != SILENT.casefold()]
        match = msgspec.structs.replace(match, event_type=tuple(types))
    for key, text in unknown_words(match):
        yield Finding(f"{path}.match.{key}", f"{text}. No event matches it")

    if config.fleet is None and _notifies_no_one(route, config):
        text = (
            "with `announce_by: affected` a VM notifies only of events that affect it, and these"
            " do not: write `announce_by: all`"
        )
        yield Finding(f"{path}.match.scope", text)

    if route.fallback and set(route.fallback) <= set(route.sinks):
        text = "these sinks get the change in any case: name one that is not in `sinks`"
        yield Finding(f"{path}.fallback", text)


def _notifies_no_one(route: Route, config: Config) -> bool:
    """Whether a route is for events of other VMs, and has sinks that get only this VM's."""
    if route.match.scope != ("peer",) or set(route.match.change) & set(APPROVAL_KINDS):
        return False
    terms = config.routing.sinks
    announce_by = {terms[sink].announce_by(route) for sink in route.sinks}
    return announce_by != {"all"}


def _unreached(index: int, routes: Sequence[Route]) -> Iterator[Finding]:
    """Yield a warning if an earlier route takes every change that a route matches."""
    for earlier, route in enumerate(routes[:index]):
        if not route.continues and _covers(route.match, routes[index].match):
            text = (
                f"routes[{earlier}] takes all that this route matches: write `continue: true`"
                " there, or change the order"
            )
            yield Finding(f"routes[{index}]", text)
            return


def _covers(wide: Match, narrow: Match) -> bool:
    """Whether everything that ``narrow`` matches is certainly matched by ``wide``."""
    if wide.duration is not None and wide.duration != narrow.duration:
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
    """Whether the words of a matcher contain those of another; no words match everything."""
    if not wide:
        return True
    words = {word.casefold() for word in wide}
    return bool(narrow) and words >= {word.casefold() for word in narrow}


def _of_advice(messages: Messages) -> Iterator[Finding]:
    for event_type in messages.advice:
        for _, text in unknown_words(EventMatch(event_type=(event_type,))):
            key = f"messages.advice.{event_type}"
            yield Finding(key, f"{text}. No message contains this text")


def _unused_by_fleet(places: Places) -> Iterator[Finding]:
    for key in ("approval", "heartbeat", "otlp"):
        if key in places:
            yield Finding(key, "only the agent uses this")


def _of_state(config: Config, places: Places) -> Iterator[Finding]:
    """Yield warnings about a state directory that is too long, or that this user cannot write."""
    if "state.dir" not in places:
        return
    length = len(os.fsencode(config.state.dir))
    if length > MAX_STATE_DIR and sys.platform != "win32":
        text = (
            f"it has {length} bytes: with more than {MAX_STATE_DIR}, there is no control socket,"
            " and commands cannot ask the agent, for example `notbefore approve`"
        )
        yield Finding("state.dir", text)
    directory = nearest_existing(Path(config.state.dir))
    if directory.is_dir() and not os.access(directory, os.W_OK | os.X_OK):
        text = f"this user cannot write {directory}: the agent's own user has to"
        yield Finding("state.dir", text)


def nearest_existing(path: Path) -> Path:
    """Return the path, or the nearest directory above it that exists."""
    for candidate in (path, *path.absolute().parents):
        if status_of(candidate) is not None:
            return candidate
    return path


def _misspelled_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each ``NOTBEFORE_SECTION_KEY`` with a single underscore between them."""
    sections = {field.name: field.type for field in msgspec.structs.fields(Config)}
    for variable in sorted(environment):
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        section, _, key = name.partition("_")
        if key in getattr(sections.get(section), "__struct_fields__", ()):
            correct = f"{ENVIRONMENT_PREFIX}{section}__{key}".upper()
            yield (
                f"{variable}: this variable is ignored: two underscores stand after the section,"
                f" {correct}"
            )


def _files_of(config: Config, places: Places) -> Iterator[Path]:
    """Yield the file of the configuration, and those that it names."""
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
    """Return the settings of all connections, for sinks and for the rest."""
    connections = [sink.settings for sink in config.sinks.values()]
    if config.fleet is not None:
        connections.append(config.fleet.hub)
    if config.otlp is not None:
        connections.append(config.otlp)
    return connections


def _writable(files: Iterable[Path]) -> Iterator[str]:
    """Yield a warning for each file that every user may write. A missing file is an error
    elsewhere.
    """
    if not hasattr(os, "geteuid"):  # Windows has access lists
        return
    for file in dict.fromkeys(files):
        status = status_of(file)
        if status is not None and status.st_mode & stat.S_IWOTH:
            yield (
                f"{file} can be written by every user of this machine. Its content decides which"
                " commands the agent runs, where it sends, and who may read from it: chmod o-w"
                f" {file}"
            )
