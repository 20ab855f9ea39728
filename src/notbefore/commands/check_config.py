"""``notbefore check-config``: show the mistakes in a configuration, and warnings.

It makes no connections: ``notbefore drill`` shows whether a receiver accepts a message.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Final

from msgspec import UNSET, Struct, UnsetType

from notbefore.commands.main import OK, WRONG
from notbefore.commands.options import add_configuration, add_json, overrides, print_json
from notbefore.commands.rendered import RenderedSample, failures_of, rendered_samples
from notbefore.config.extras import check_extra
from notbefore.config.lint import nearest_existing, warnings
from notbefore.config.load import examine
from notbefore.config.model import Config
from notbefore.config.sinks import REQUEST_TEMPLATE
from notbefore.config.yaml_file import Places
from notbefore.core.text import escaped
from notbefore.courier.sinks import try_out
from notbefore.errors import ConfigError, Mistake
from notbefore.logs import set_up
from notbefore.web.access import Access

EVERY_SINK: Final = ""  # the value of ``--render`` alone
# command -> a module whose imports are everything that the command needs
MODULES: Final = {"run": "notbefore.agent.agent", "fleet": "notbefore.fleet.instance"}


class MistakeReport(Struct, frozen=True):
    """One mistake in the configuration."""

    file: str  # or the variable of the environment, or the option
    line: int  # from 1; 0 outside a file
    column: int  # from 1; 0 outside a file
    key: str  # the path of the key, such as server.listen; empty for the whole file
    text: str  # what was expected


class CheckReport(Struct, frozen=True, kw_only=True):
    """The result of a check."""

    ok: bool  # with --strict, a warning makes it false
    error: str | None  # the mistakes in one text
    mistakes: list[MistakeReport] | UnsetType = UNSET  # only with an error
    warnings: list[str] | UnsetType = UNSET  # only without an error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the configuration, ``--strict`` and ``--json``."""
    add_configuration(parser)
    parser.add_argument(
        "--for",
        dest="starting",
        choices=MODULES,
        default="run",
        help="the command that will read it (default run)",
    )
    parser.add_argument(
        "--render",
        nargs="?",
        const=EVERY_SINK,
        metavar="SINK",
        help="show the messages about each type of event, as each sink or the named one gets them",
    )
    parser.add_argument("--strict", action="store_true", help="exit with 2 if there is a warning")
    add_json(parser, "print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Print the result; return the exit code.

    Raises ``ConfigError`` with the mistakes, unless ``--json``.
    """
    set_up("text", "critical")  # a library's log line about an address may hold a secret
    try:
        config, places = _examine(options)
    except ConfigError as error:
        if not options.json:
            raise
        mistakes = [_as_json(mistake) for mistake in error.mistakes]
        print_json([CheckReport(ok=False, error=str(error), mistakes=mistakes)])
        return WRONG

    if options.render is not None:
        return _show(config, options.render, as_json=options.json)

    texts = warnings(config, places)
    code = OK
    if options.strict and texts:
        code = WRONG
    if options.json:
        print_json([CheckReport(ok=code == OK, error=None, warnings=texts)])
        return code
    sys.stderr.writelines(f"notbefore: warning: {escaped(text)}\n" for text in texts)
    name = options.config or "The configuration (no file: defaults, environment and command line)"
    if texts:
        sys.stdout.write(f"{name} is valid, with {len(texts)} warning(s): see above.\n")
    else:
        sys.stdout.write(f"{name} is valid.\n")
    return code


def _show(config: Config, sink: str, *, as_json: bool) -> int:
    """Print what each sink, or the one with this name, sends about the sample events."""
    if not config.sinks:
        raise ConfigError(
            "--render: this configuration has no sink, so there is no text to show. The file stands"
            " before --render: check-config CONFIG --render [SINK]"
        )
    if sink and sink not in config.sinks:
        all_sinks = ", ".join(config.sinks)
        raise ConfigError(f"--render: there is no sink {sink!r} (known: {all_sinks})")
    names = list(config.sinks)
    if sink:
        names = [sink]
    for name in names:
        for sample in rendered_samples(name, config.sinks[name], config.messages):
            if as_json:
                print_json([sample])
            else:
                _print_sample(sample)
    return OK


def _print_sample(sample: RenderedSample) -> None:
    sys.stdout.write(f"--- {sample.heading}\n")
    if sample.title is not None:
        sys.stdout.write(f"{escaped(sample.title)}\n\n")
    for line in sample.body.splitlines():
        sys.stdout.write(f"{escaped(line)}\n")
    sys.stdout.write("\n")


def _as_json(mistake: Mistake) -> MistakeReport:
    return MistakeReport(
        file=mistake.place.origin,
        line=mistake.place.line,
        column=mistake.place.column,
        key=mistake.key,
        text=mistake.text,
    )


def _examine(options: argparse.Namespace) -> tuple[Config, Places]:
    """Return the configuration and the places of its keys.

    Raises ``ConfigError`` with all mistakes.
    """
    config, places, mistakes = examine(options.config, os.environ, overrides(options))
    if options.starting == "fleet":
        has_mistakes = any(mistake.key.startswith("fleet") for mistake in mistakes)
        if config.fleet is None and not has_mistakes:
            text = "the section that names the hub to read is missing"
            mistakes.append(Mistake(places.nearest("fleet"), "fleet", text))
        check_extra("fleet")
    _check_installation(options.starting)

    mistakes += _impossible_state_dir(config, places)
    mistakes += _unusable_sinks(config, places)
    mistakes += _open_access(config, places)
    mistakes += _failing_templates(config, places)
    if mistakes:
        raise ConfigError.of(mistakes)
    return config, places


def _check_installation(command: str) -> None:
    try:
        import_module(MODULES[command])
    except ImportError as error:
        raise ConfigError(
            f"this installation is not complete ({error}): install it again"
        ) from None


def _impossible_state_dir(config: Config, places: Places) -> Iterator[Mistake]:
    """Yield a mistake if the state directory cannot be created."""
    existing = nearest_existing(Path(config.state.dir))
    if not existing.is_dir():
        text = f"it cannot be created: {existing} is not a directory"
        yield Mistake(places.nearest("state.dir"), "state.dir", text)


def _unusable_sinks(config: Config, places: Places) -> Iterator[Mistake]:
    """Yield a mistake for each sink that a courier could not make."""
    for name, sink in config.sinks.items():
        try:
            try_out(name, sink)
        except ConfigError as error:
            key = f"sinks.{name}.{sink.kind}"
            yield Mistake(places.nearest(key), key, str(error))


def _failing_templates(config: Config, places: Places) -> Iterator[Mistake]:
    """Yield each failure of a template, with the first sample message that shows it."""
    failures: dict[str, str] = {}
    for name, sink in config.sinks.items():
        for key, text in failures_of(name, sink, config.messages).items():
            path = key
            if key == REQUEST_TEMPLATE:
                path = f"sinks.{name}.{sink.kind}.{key}"
            failures.setdefault(path, text)
    for path, text in failures.items():
        yield Mistake(places.nearest(path), path, text)


def _open_access(config: Config, places: Places) -> Iterable[Mistake]:
    """Return the mistakes of the listener, such as one that lets others read."""
    try:
        Access(config.server).check_listen()
    except ConfigError as error:
        if error.mistakes:  # of the web configuration
            return error.mistakes
        key = "server.web_config_file"
        text = str(error)
        if text.startswith("server.listen: "):
            key = "server.listen"
            text = text.removeprefix("server.listen: ")
        return [Mistake(places.nearest(key), key, text)]
    return []
