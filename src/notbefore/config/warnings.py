"""What is no mistake in a configuration, but probably not intended; and what cannot work on this machine.

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

from notbefore.config.load import ENVIRONMENT_PREFIX
from notbefore.config.model import Config
from notbefore.config.yaml_file import Places, read
from notbefore.core.approval import unknown_words
from notbefore.core.change import APPROVAL_KINDS, SILENT
from notbefore.core.document import SCHEDULED, STARTED
from notbefore.core.routing import EventMatch, Match, Route
from notbefore.core.text import one_of
from notbefore.errors import Mistake

Finding = tuple[str, str]  # the path of a key, and what is wrong with it
NO_KEY: Final = re.compile(r"https?://[^/?#@]+(?:/[^/?#]{0,16})*")  # an address in which no part is like a key


def warnings(config: Config, path: Path | None) -> list[str]:
    """Return one text for each finding; ``path`` is the file that ``config`` was read from."""
    places = read(path)[1] if path is not None else Places()
    doubtful = [*broken(config), *_of_state_and_sinks(config), *_of_routes(config)]
    doubtful += [(key, text) for key, text in _plain_secrets(config) if key in places]  # not those of variables
    return [
        *_misspelt_variables(os.environ),
        *_writable(path, config.server.web_config_file),
        *(str(Mistake(places.nearest(key), key, text)) if places else f"{key}: {text}" for key, text in doubtful),
    ]


def _plain_secrets(config: Config) -> Iterator[Finding]:
    """Yield each key under which a secret stands as plain text; an address of a webhook that holds no key is none."""
    found = {"heartbeat.ping_url": config.heartbeat.ping_url} if config.heartbeat is not None else {}
    for name, sink in config.sinks.items():
        found |= {f"sinks.{name}.{sink.kind}.{key}": secret for key, secret in sink.secrets.items()}
        if sink.webhook is not None and NO_KEY.fullmatch(sink.webhook.url.reveal()):
            del found[f"sinks.{name}.webhook.url"]
    if config.otlp is not None:
        found |= {f"otlp.headers.{name}": secret for name, secret in config.otlp.headers.items()}
    text = (
        "a secret stands in the file itself: write it to /etc/notbefore/credentials/NAME, which only root can read, and"
        " name it instead: KEY_credential: NAME (for a header {credential: NAME}), or KEY_file"
    )
    yield from ((key, text) for key, secret in found.items() if secret.source == "inline")


def broken(config: Config) -> Iterator[Finding]:
    """Yield what cannot work: an error in ``check-config``. The agent warns of it, and watches all the same."""
    from shutil import which  # noqa: PLC0415 - only where a configuration is checked

    for name, sink in config.sinks.items():
        if sink.command is not None and which(program := sink.command.command[0]) is None:
            yield f"sinks.{name}.command.command", f"{program} is no program that can be run: install it, or chmod +x"
        host = urlsplit(sink.webhook.url.reveal()).hostname if sink.webhook is not None else None
        if sink.webhook is not None and not sink.webhook.allow_private and _is_private(host or ""):
            text = f"{host} is not a public address: set `allow_private: true` if it is the right one"
            yield f"sinks.{name}.webhook.url", text
    if Path(config.state.dir).is_file():
        yield "state.dir", f"{config.state.dir} is a file: name a directory"


def _is_private(host: str) -> bool:
    """Whether the courier would not connect to it; a name may lead anywhere."""
    from ipaddress import ip_address  # noqa: PLC0415 - only where there are webhooks

    try:
        return host == "localhost" or not ip_address(host).is_global
    except ValueError:
        return False


def _of_state_and_sinks(config: Config) -> Iterator[Finding]:
    if not (Path(config.state.dir).is_absolute() or PureWindowsPath(config.state.dir).is_absolute()):
        text = "is relative to the directory in which the agent is started: give an absolute path"
        yield "state.dir", f"{config.state.dir} {text}"
    used = {name for route in config.routes for name in (*route.sinks, *route.fallback)}
    used |= {name for name, sink in config.sinks.items() if sink.event_hub and sink.event_hub.heartbeat}
    for name in config.sinks:
        if config.routes and name not in used:
            text = f"no route leads to the sink {name}, so nothing is sent there: name it under `routes`"
            yield f"sinks.{name}", text


def _of_routes(config: Config) -> Iterator[Finding]:
    for number, route in enumerate(config.routes):
        fleet = config.fleet is not None
        for key, text in (*_never_matching(route.match, fleet=fleet), *(() if fleet else _alone(route))):
            yield f"routes[{number}].match.{key}", text
    for number, before in _hidden([(route.match, not route.go_on) for route in config.routes]):
        text = f"it is never reached, since routes[{before}] matches all that it matches: move it up"
        yield f"routes[{number}]", f"{text}, or add `continue: true` to routes[{before}]"
    for number, before in _hidden([(rule.matcher, True) for rule in config.approval.rules]):
        yield f"approval.rules[{number}]", f"it is never reached, since rules[{before}] decides before it: move it up"


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


def _misspelt_variables(environment: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(environment):
        section, _, key = name.removeprefix(ENVIRONMENT_PREFIX).lower().partition("_")
        kind = next((field.type for field in msgspec.structs.fields(Config) if field.name == section), None)
        if name.startswith(ENVIRONMENT_PREFIX) and key in getattr(kind, "__struct_fields__", ()):
            meant = f"{ENVIRONMENT_PREFIX}{section}__{key}".upper()
            yield f"{name}: this variable is ignored: two underscores stand after the section, {meant}"


def _writable(*paths: Path | str | None) -> Iterator[str]:
    """Which of the files every user may write; one that is not there is an error elsewhere."""
    for file in [Path(one) for one in paths if one] if hasattr(os, "geteuid") else ():  # Windows has access lists
        if file.exists() and file.stat().st_mode & stat.S_IWOTH:
            yield (
                f"{file} can be written by every user of this machine: who writes it decides which commands the agent"
                f" runs, and who may read from it: chmod o-w {file}"
            )
