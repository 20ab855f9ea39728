"""What is no mistake in a configuration, but probably not intended: a route that never matches, a sink without one.

``warnings`` needs no connection; ``run`` logs what it returns, ``check-config`` shows it.
"""

import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import Final
from urllib.parse import SplitResult, urlsplit

import msgspec

from notbefore.config.checks import Finding, broken
from notbefore.config.load import ENVIRONMENT_PREFIX
from notbefore.config.model import Config
from notbefore.config.secret import Secret
from notbefore.config.yaml_file import Places, read
from notbefore.core.approval import unknown_words
from notbefore.core.change import APPROVAL_KINDS, SILENT
from notbefore.core.document import PREEMPT, PROMISED, SCHEDULED, STARTED
from notbefore.core.routing import EventMatch, Match, Route
from notbefore.core.text import one_of
from notbefore.errors import Mistake

LONGEST_WORD: Final = 16  # characters; what is longer in an address may be a key
SERVICES: Final = {  # host of a service that does not understand the record that a webhook is sent -> the sink for it
    "hooks.slack.com": "slack",
    "events.pagerduty.com": "pagerduty",
    "webhook.office.com": "apprise",
    "discord.com": "apprise",
}


def warnings(config: Config, path: Path | None) -> list[str]:
    """Return one text for each finding; ``path`` is the file that ``config`` was read from."""
    places = read(path)[1] if path is not None else Places()
    doubtful = [*broken(config), *_of_sinks(config), *_of_addresses(config), *_of_routes(config), *_of_state(config)]
    return [
        *_misspelt_variables(os.environ),
        *_of_files(config, path, places),
        *(str(Mistake(places.nearest(key), key, text)) if places else f"{key}: {text}" for key, text in doubtful),
    ]


def plain_secrets(config: Config) -> list[str]:
    """Return the keys under which a secret stands as plain text, without the addresses of webhooks that hold no key."""
    found = {"heartbeat.ping_url": config.heartbeat.ping_url} if config.heartbeat is not None else {}
    for name, sink in config.sinks.items():
        found |= {f"sinks.{name}.{sink.kind}.{key}": secret for key, secret in sink.secrets.items()}
        if sink.webhook is not None and _holds_no_key(_split(sink.webhook.url)):
            del found[f"sinks.{name}.webhook.url"]
    if config.otlp is not None:
        found |= {f"otlp.headers.{name}": secret for name, secret in config.otlp.headers.items()}
    return [key for key, secret in found.items() if secret.source == "inline"]


def _holds_no_key(url: SplitResult) -> bool:
    """Whether it is host and path alone, without a user, a query, or a part of the path that is like a key."""
    words = max(map(len, url.path.split("/"))) <= LONGEST_WORD
    return words and not (url.username or url.password or url.query or url.fragment)


def _split(secret: Secret) -> SplitResult:
    return urlsplit(secret.reveal())


def _of_sinks(config: Config) -> Iterator[Finding]:
    used = {name for route in config.routes for name in (*route.sinks, *route.fallback)}
    used |= {name for name, sink in config.sinks.items() if sink.event_hub and sink.event_hub.heartbeat}
    for name, sink in config.sinks.items():
        if config.routes and name not in used:
            text = f"no route leads to the sink {name}, so nothing is sent there: name it under `routes`"
            yield f"sinks.{name}", text
        if sink.email is not None and (sink.email.port, sink.email.tls) == (465, "starttls"):
            yield f"sinks.{name}.email.port", "at 465 a mail server expects TLS from the first byte on: `tls: tls`"


def _of_addresses(config: Config) -> Iterator[Finding]:
    """What is probably the address of something else: another service, or one with a path that is added."""
    added = {"otlp.endpoint": config.otlp.endpoint} if config.otlp is not None else {}
    for name, sink in config.sinks.items():
        host = f".{_split(sink.webhook.url).hostname}" if sink.webhook is not None else ""
        for service, kind in SERVICES.items():
            if host.endswith(f".{service}"):
                text = f"{service} does not understand what a webhook is sent: use the sink `{kind}`"
                yield f"sinks.{name}.webhook.url", text
        if sink.otlp_logs is not None:
            added[f"sinks.{name}.otlp_logs.endpoint"] = sink.otlp_logs.endpoint
        for member in sink.alertmanager.urls if sink.alertmanager is not None else ():
            added[f"sinks.{name}.alertmanager.urls"] = member
    for key, url in added.items():
        if path := re.search(r"/v1/(?:metrics|logs|traces)(?=/?$)|/api/v2.*", url or ""):
            yield key, f"{path[0]} is added to it: leave it out here"


def _of_routes(config: Config) -> Iterator[Finding]:
    for number, route in enumerate(config.routes):
        fleet = config.fleet is not None
        for key, text in (*_never_matching(route.match, fleet=fleet), *(() if fleet else _alone(route))):
            yield f"routes[{number}].match.{key}", text
        yield from ((f"routes[{number}].{key}", text) for key, text in _without_use(route))
    for number, before in _hidden([(route.match, not route.go_on) for route in config.routes]):
        text = f"it is never reached, since routes[{before}] matches all that it matches: move it up"
        yield f"routes[{number}]", f"{text}, or add `continue: true` to routes[{before}]"
    for number, before in _hidden([(rule.matcher, True) for rule in config.approval.rules]):
        yield f"approval.rules[{number}]", f"it is never reached, since rules[{before}] decides before it: move it up"


def _without_use(route: Route) -> Iterator[Finding]:
    """What of a route changes nothing."""
    types, notice = {one.casefold() for one in route.match.event_type}, PROMISED[PREEMPT]
    if types == {PREEMPT.casefold()} and any(one.seconds >= notice for one in route.remind_before):
        yield "remind_before", f"a Preempt has {notice:g} s of notice: nobody is reminded so long before it"
    if not route.fallback and route.fallback_after != Route().fallback_after:
        yield "fallback_after", "there is no `fallback`: name the sinks that are tried then"


def _never_matching(match: Match, *, fleet: bool) -> Iterator[Finding]:
    if fleet:  # only it knows this type
        match = msgspec.structs.replace(match, event_type=tuple(one for one in match.event_type if one != SILENT))
    for key, text in unknown_words(match):
        yield key, f"{text}. This word matches no event"
    for word in match.event_status:
        if word.casefold() not in (SCHEDULED.casefold(), STARTED.casefold()):
            yield "event_status", f"Azure has no {word!r}{one_of(word, (SCHEDULED, STARTED))}"


def _alone(route: Route) -> Iterator[Finding]:
    """What does not work on an agent, where each VM notifies by itself."""
    approvals = set(route.match.change) & set(APPROVAL_KINDS)
    if route.match.scope == ("peer",) and route.announce_by != "all" and not approvals:
        text = f"with `announce_by: {route.announce_by}` a VM notifies only of events that affect it, and these do not"
        yield "scope", f"{text}: write `announce_by: all`"


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


def _of_state(config: Config) -> Iterator[Finding]:
    if not (Path(config.state.dir).is_absolute() or PureWindowsPath(config.state.dir).is_absolute()):
        text = "is relative to the directory in which the agent is started: give an absolute path"
        yield "state.dir", f"{config.state.dir} {text}"
    inventory = config.fleet.inventory_file if config.fleet is not None else None
    if inventory is not None and not os.access(inventory, os.R_OK):
        yield "fleet.inventory_file", f"{inventory} cannot be read: until it can, no VM is missing"


def _misspelt_variables(environment: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(environment):
        section, _, key = name.removeprefix(ENVIRONMENT_PREFIX).lower().partition("_")
        kind = next((field.type for field in msgspec.structs.fields(Config) if field.name == section), None)
        if name.startswith(ENVIRONMENT_PREFIX) and key in getattr(kind, "__struct_fields__", ()):
            meant = f"{ENVIRONMENT_PREFIX}{section}__{key}".upper()
            yield f"{name}: this variable is ignored: two underscores stand after the section, {meant}"


def _of_files(config: Config, path: Path | None, places: Places) -> Iterator[str]:
    """Who else may read or write the files that are read."""
    # a secret may also come from the environment
    plain = [key for key in plain_secrets(config) if key in places]
    if path is not None and plain and path.stat().st_mode & stat.S_IROTH:
        yield (
            f"{path} can be read by every user of this machine, and holds secrets: {', '.join(plain)}. Move each to"
            " a file that only the service may read, and name it: KEY_file, or KEY_credential under systemd"
        )
    web = config.server.web_config_file
    posix = hasattr(os, "geteuid")  # Windows: its access lists are another matter
    for file in filter(None, (path, Path(web) if web is not None else None)) if posix else ():
        # one that is not there is an error elsewhere
        if file.exists() and file.stat().st_mode & stat.S_IWOTH:
            yield (
                f"{file} can be written by every user of this machine: who writes it decides which commands the agent"
                f" runs, and who may read from it: chmod o-w {file}"
            )
