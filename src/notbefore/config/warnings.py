"""What is no mistake in a configuration, but probably not intended.

``warnings`` needs no connection; ``run`` logs what it returns, ``check-config`` shows it.
"""

import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from notbefore.config.load import ENVIRONMENT_PREFIX
from notbefore.config.model import Config
from notbefore.config.secret import secrets_in
from notbefore.config.yaml_file import Places
from notbefore.core.approval import unknown_words
from notbefore.core.change import APPROVAL_KINDS, SILENT
from notbefore.core.routing import Route
from notbefore.errors import Mistake

Finding = tuple[str, str]  # the path of a key, and what is wrong with it
NO_KEY: Final = re.compile(r"https?://[^/?#@]+(?:/[^/?#]{0,16})*")  # an address in which no part is like a key


def warnings(config: Config, places: Places) -> list[str]:
    """Return one text for each finding; ``places``: of what stands in the file and elsewhere."""
    found = [*_of_sinks(config), *_plain_secrets(config, places)]
    for number, route in enumerate(config.routes):
        found += [(f"routes[{number}].match.{key}", text) for key, text in _of_route(route, fleet=bool(config.fleet))]
    return [
        *_misspelt_variables(os.environ),
        *_writable(places[""].origin if "" in places else None, config.server.web_config_file),
        *(str(Mistake(places.nearest(key), key, text)) for key, text in found),
    ]


def _of_sinks(config: Config) -> Iterator[Finding]:
    if Path(config.state.dir).is_file():
        yield "state.dir", f"{config.state.dir} is a file: name a directory"
    used = {name for route in config.routes for name in (*route.sinks, *route.fallback)}
    for name, sink in config.sinks.items():
        heartbeats = sink.event_hub is not None and sink.event_hub.heartbeat
        if config.routes and name not in used and not heartbeats:
            text = f"no route leads to the sink {name}, so nothing is sent there: name it under `routes`"
            yield f"sinks.{name}", text
        program = sink.command.command[0] if sink.command is not None else None
        # ``shutil.which`` does the same: its import costs every agent 0.5 MiB
        if program is not None and not (Path(program).is_file() and os.access(program, os.X_OK)):
            yield f"sinks.{name}.command.command", f"{program} is no program that can be run: install it, or chmod +x"


def _plain_secrets(config: Config, places: Places) -> Iterator[Finding]:
    """Yield each key under which a secret stands as plain text; an address of a webhook that holds no key is none."""
    text = (
        "a secret stands in the file itself: write it to /etc/notbefore/credentials/NAME, which only root can read, and"
        " name it instead: KEY_credential: NAME (for a header {credential: NAME}), or KEY_file"
    )
    for key, secret in secrets_in(config).items():
        no_key = key.endswith(".webhook.url") and NO_KEY.fullmatch(secret.reveal())
        if secret.source == "inline" and places.nearest(key).line and not no_key:
            yield key, text


def _of_route(route: Route, *, fleet: bool) -> Iterator[Finding]:
    """Yield what of a route's matchers matches no change."""
    match = route.match
    if fleet:  # only it knows this type
        match = msgspec.structs.replace(match, event_type=tuple(one for one in match.event_type if one != SILENT))
    for key, text in unknown_words(match):
        yield key, f"{text}. This word matches no event"
    approvals = set(match.change) & set(APPROVAL_KINDS)
    if match.scope == ("peer",) and route.announce_by != "all" and not approvals and not fleet:
        text = f"with `announce_by: {route.announce_by}` a VM notifies only of events that affect it, and these do not"
        yield "scope", f"{text}: write `announce_by: all`"


def _misspelt_variables(environment: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(environment):
        section, _, key = name.removeprefix(ENVIRONMENT_PREFIX).lower().partition("_")
        kind = next((field.type for field in msgspec.structs.fields(Config) if field.name == section), None)
        if name.startswith(ENVIRONMENT_PREFIX) and key in getattr(kind, "__struct_fields__", ()):
            meant = f"{ENVIRONMENT_PREFIX}{section}__{key}".upper()
            yield f"{name}: this variable is ignored: two underscores stand after the section, {meant}"


def _writable(*paths: str | None) -> Iterator[str]:
    """Which of the files every user may write; one that is not there is an error elsewhere."""
    for file in [Path(one) for one in paths if one] if hasattr(os, "geteuid") else ():  # Windows has access lists
        if file.exists() and file.stat().st_mode & stat.S_IWOTH:
            yield (
                f"{file} can be written by every user of this machine: who writes it decides which commands the agent"
                f" runs, and who may read from it: chmod o-w {file}"
            )
