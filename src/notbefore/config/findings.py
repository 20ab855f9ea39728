"""What is not an error in a configuration, but probably not intended: a route that never matches, a sink without one.

``warnings`` needs no connection; ``run`` logs what it returns, ``check-config`` shows it.
"""

import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import Final
from urllib.parse import urlsplit

import msgspec

from notbefore.config.addresses import unlikely
from notbefore.config.checks import command_problem, webhook_problem
from notbefore.config.load import ENVIRONMENT_PREFIX, missing_library
from notbefore.config.model import Config
from notbefore.config.otel_variables import Variables
from notbefore.config.otlp import otlp_headers
from notbefore.config.sinks import Webhook
from notbefore.config.yaml_file import located, read
from notbefore.core.approval import unknown_words
from notbefore.core.change import APPROVAL_KINDS, SILENT
from notbefore.core.document import EVENT_TYPES, SCHEDULED, STARTED
from notbefore.core.routing import EventMatch, Match, Route
from notbefore.core.text import one_of

LONGEST_WORD: Final = 16  # characters; what is longer in an address may be a key
PLACES: Final = ("{vm}", "{event_type}")  # in the links of messages


def warnings(config: Config, path: Path | None) -> list[str]:
    """Return one text for each finding; ``path`` is the file that ``config`` was read from."""
    places = read(path)[1] if path is not None else {}
    found = [
        *_otlp_variables(config, os.environ),
        *_misspelt_variables(os.environ),
        *_plain_secrets(config, path, places),
        *_writable_files(config, path),
    ]
    found += [str(located(places, key, text)) if places else f"{key}: {text}" for key, text in _of_keys(config)]
    return found


def plain_keys(config: Config) -> list[str]:
    """Return ``plain_secrets`` without the addresses of webhooks that hold no key."""
    webhooks = {f"sinks.{name}.webhook.url": sink.webhook for name, sink in config.sinks.items()}
    return [key for key in plain_secrets(config) if not _holds_no_key(webhooks.get(key))]


def _holds_no_key(webhook: Webhook | None) -> bool:
    """Whether its address is host and path alone, without a user, a query, or a part of the path that is like a key."""
    if webhook is None:
        return False
    url = urlsplit(webhook.url.reveal())
    words = max(map(len, url.path.split("/"))) <= LONGEST_WORD
    return words and not (url.username or url.password or url.query or url.fragment)


def check_broken(config: Config, path: Path | None) -> None:
    """Raise ``ConfigError`` for what cannot work as it is. The agent only warns of it, and watches all the same."""
    for key, text in _broken(config):
        raise located(read(path)[1] if path is not None else {}, key, text)


def plain_secrets(config: Config) -> list[str]:
    """Return the keys under which a secret stands as plain text."""
    ping_url = config.heartbeat.ping_url if config.heartbeat is not None else None
    found = ["heartbeat.ping_url"] if ping_url is not None and ping_url.source == "inline" else []
    found += [
        f"sinks.{name}.{sink.kind}.{key}"
        for name, sink in config.sinks.items()
        for key, secret in sink.secrets.items()
        if secret.source == "inline"
    ]
    return found + [path for path, secret in otlp_headers(config.otlp).items() if secret.source == "inline"]


def _broken(config: Config) -> Iterator[tuple[str, str]]:
    for name, sink in config.sinks.items():
        if sink.command is not None and (problem := command_problem(sink.command.command[0])):
            yield f"sinks.{name}.command.command", problem
        if problem := webhook_problem(sink):
            yield f"sinks.{name}.webhook.url", problem


def _of_keys(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the path of a key, and what is wrong with it."""
    yield from _broken(config)
    yield from _unused(config)
    for number, route in enumerate(config.routes):
        fleet = config.fleet
        match = route.match if fleet is None else _without_silent(route.match)
        alone = _alone(route) if fleet is None else _of_many(route.match)
        for key, text in (*_never_matching(match), *alone):
            yield f"routes[{number}].{key}", text
        for name in set(route.sinks) & set(route.fallback):
            yield f"routes[{number}].fallback", f"{name} is one of `sinks` already: leave it out here"
    for number, before in _hidden([(route.match, not route.go_on) for route in config.routes]):
        text = f"it is never reached, since routes[{before}] matches all that it matches: move it up"
        yield f"routes[{number}]", f"{text}, or add `continue: true` to routes[{before}]"
    for number, before in _hidden([(rule.matcher, True) for rule in config.approval.rules]):
        yield f"approval.rules[{number}]", f"it is never reached, since rules[{before}] decides before it: move it up"
    yield from unlikely(config)
    yield from _messages(config)
    if not (Path(config.state.dir).is_absolute() or PureWindowsPath(config.state.dir).is_absolute()):
        yield (
            "state.dir",
            f"{config.state.dir} is relative to the directory in which the agent is started: give an absolute path",
        )


def _unused(config: Config) -> Iterator[tuple[str, str]]:
    used = {name for route in config.routes for name in (*route.sinks, *route.fallback)}
    used |= {name for name, sink in config.sinks.items() if sink.event_hub and sink.event_hub.heartbeat}
    used |= {config.heartbeat.sink} if config.heartbeat is not None and config.heartbeat.sink is not None else set()
    for name in config.sinks if config.routes else ():
        if name not in used:
            text = f"no route leads to the sink {name}, so nothing is sent there: name it under `routes`"
            yield f"sinks.{name}", text
    if config.fleet is not None and config.records.tags:
        yield "records.tags", "`notbefore fleet` has the tags from the agents' records: set it in their configuration"
    inventory = config.fleet.inventory_file if config.fleet is not None else None
    if inventory is not None and not os.access(inventory, os.R_OK):
        yield "fleet.inventory_file", f"{inventory} cannot be read: until it can, no VM is missing"
    if config.peers is not None and all(route.announce_by != "leader" for route in config.routes):
        yield "peers", "nobody is asked: only routes with `announce_by: leader` ask the agents of other VMs"


def _without_silent(match: Match) -> Match:
    """Without the type that only a fleet has."""
    return msgspec.structs.replace(match, event_type=tuple(one for one in match.event_type if one != SILENT))


def _never_matching(match: EventMatch) -> Iterator[tuple[str, str]]:
    for key, text in unknown_words(match):
        yield f"match.{key}", f"{text}. This word matches no event"
    for word in getattr(match, "event_status", ()):
        if word.casefold() not in (SCHEDULED.casefold(), STARTED.casefold()):
            yield "match.event_status", f"Azure has no {word!r}{one_of(word, (SCHEDULED, STARTED))}"
    for region in getattr(match, "location", ()):
        if " " in region:
            yield "match.location", f"Azure writes regions without spaces: {''.join(region.split()).lower()}"
    if found := re.search(r"[\w-](?=\*)", getattr(match, "resource", None) or ""):
        text = f"this is a regular expression, and `{found[0]}*` means any number of `{found[0]}`"
        yield "match.resource", f"{text}: for any text write `.*`"
    if match.notice_below is not None and not match.notice_below.seconds:
        yield "match.notice_below", "no notice is shorter than 0s: give a longer one, such as 5m"
    if match.duration is not None and match.duration.max is not None and match.duration.max < 0:
        yield "match.duration", "no duration is below 0: for one that Azure does not know write {unknown: true}"


def _of_many(match: Match) -> Iterator[tuple[str, str]]:
    """What a route of the fleet asks, and what no notification of it has."""
    if match.scope and "self" not in match.scope:
        yield "match.scope", "whatever the fleet notifies of has the scope self: leave it out"
    if match.change and set(match.change) <= set(APPROVAL_KINDS):
        yield "match.change", "the fleet reads no approvals, so nothing matches: route them on the agents"


def _alone(route: Route) -> Iterator[tuple[str, str]]:
    """What does not work on an agent, where each VM notifies by itself."""
    approvals = set(route.match.change) & set(APPROVAL_KINDS)
    if route.match.scope == ("peer",) and route.announce_by != "all" and not approvals:
        text = f"with `announce_by: {route.announce_by}` a VM notifies only of events that affect it, and these do not"
        yield "match.scope", f"{text}: write `announce_by: all`"
    own = [key for key in ("vm", "zone", "tags") if getattr(route.match, key)]
    if own and route.announce_by == "leader":
        text = "where the VMs of an event differ in it, this route may not apply to the leader, and nobody is notified"
        yield f"match.{own[0]}", f"{text}: write `announce_by: affected`"


def _hidden(matchers: Sequence[tuple[EventMatch, bool]]) -> Iterator[tuple[int, int]]:
    """Yield (number, number of an earlier one that matches all that it matches and is the last one to be tried)."""
    for number, (match, _) in enumerate(matchers):
        for before, (earlier, ends) in enumerate(matchers[:number]):
            if ends and all(_covers(getattr(earlier, key), getattr(match, key)) for key in match.__struct_fields__):
                yield number, before
                break


def _covers(earlier: object, later: object) -> bool:
    if not earlier or earlier == later:
        return True
    if not (isinstance(earlier, tuple) and isinstance(later, tuple) and later):
        return False
    return {str(word).casefold() for word in later} <= {str(word).casefold() for word in earlier}


def _messages(config: Config) -> Iterator[tuple[str, str]]:
    """Types of events and placeholders that nothing fills in."""
    for event_type in config.messages.advice:
        if event_type.casefold() not in (name.casefold() for name in EVENT_TYPES):
            yield f"messages.advice.{event_type}", f"Azure has no {event_type!r}{one_of(event_type, EVENT_TYPES)}"
    for name in config.messages.links.__struct_fields__:
        for word in re.findall(r"{\w*}", getattr(config.messages.links, name) or ""):
            if word not in PLACES:
                yield (
                    f"messages.links.{name}",
                    f"nothing is put in place of {word}: expected one of {', '.join(PLACES)}",
                )


def _misspelt_variables(environment: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(environment):
        section, _, key = name.removeprefix(ENVIRONMENT_PREFIX).lower().partition("_")
        kind = next((field.type for field in msgspec.structs.fields(Config) if field.name == section), None)
        if name.startswith(ENVIRONMENT_PREFIX) and key in getattr(kind, "__struct_fields__", ()):
            meant = f"{ENVIRONMENT_PREFIX}{section}__{key}".upper()
            yield f"{name}: this variable is ignored: two underscores stand after the section, {meant}"


def _plain_secrets(config: Config, path: Path | None, places: dict[str, str]) -> Iterator[str]:
    if path is None or not path.stat().st_mode & stat.S_IROTH:
        return
    # a secret may also come from the environment
    if plain := [key for key in plain_keys(config) if key in places]:
        yield (
            f"{path} can be read by every user of this machine, and holds secrets: {', '.join(plain)}. Move each to"
            " a file that only the service may read, and name it: KEY_file, or KEY_credential under systemd"
        )


def _writable_files(config: Config, path: Path | None) -> Iterator[str]:
    if not hasattr(os, "geteuid"):  # Windows: its access lists are another matter
        return
    web = config.server.web_config_file
    for file in filter(None, (path, Path(web) if web is not None else None)):
        # one that is not there is an error elsewhere
        if file.exists() and file.stat().st_mode & stat.S_IWOTH:
            yield (
                f"{file} can be written by every user of this machine: who writes it decides which commands the agent"
                f" runs, and who may read from it: chmod o-w {file}"
            )


def _otlp_variables(config: Config, environment: Mapping[str, str]) -> Iterator[str]:
    metrics = Variables(environment, "METRICS", config.otlp.protocol if config.otlp is not None else None)
    ignored = metrics.ignored if config.otlp is not None or metrics.meant else []
    logs = [sink.otlp_logs for sink in config.sinks.values() if sink.otlp_logs is not None]
    if logs or (config.otlp is not None and config.otlp.agent_log != "none"):
        ignored = [*ignored, *Variables(environment, "LOGS", logs[0].protocol if logs else None).ignored]
    yield from (f"{text}: this variable is ignored" for text in dict.fromkeys(ignored))
    if config.otlp is None and (missing := missing_library(environment)) is not None:
        yield f"OTEL_* variables ask for OTLP, and nothing is exported: {missing}"
