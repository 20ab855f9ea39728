"""Reads a YAML file: its values, and the place of each. Every mistake names line and column.

Every value is a text or ``None``; the type of its key decides whether it is a number or a boolean.
So `name: no` is a name, and `api_version: 2020-07-01` is not a date.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from notbefore.config.regular_file import open_file
from notbefore.config.shown import meant
from notbefore.errors import ConfigError, ConfigPlace, Mistake

MAX_FILE: Final = 256 * 1024  # bytes; a configuration with a hundred sinks has 30 KiB
MAX_DEPTH: Final = 32  # levels of lists and mappings; our deepest key is at level 8
MAX_EVENTS: Final = 20_000  # of the parser: one for each value, two for a list or a mapping
LONGEST_KEY: Final = 200  # characters
NOTHING: Final = ("", "~", "null", "Null", "NULL")  # YAML's words for no value


class Variable(str):
    """A text from the environment or the command line, where a list is one text with commas."""

    __slots__ = ()


class Places(dict[str, ConfigPlace]):
    """The place of each dotted path; "" is the path of the whole configuration."""

    def nearest(self, path: str) -> ConfigPlace:
        """Return the place of a path, else of the nearest section around it, else of the whole
        configuration.
        """
        while path and path not in self:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return self.get(path) or self.get("") or ConfigPlace("the configuration")


def read(path: Path) -> tuple[dict[str, Any], Places]:
    """Return the values of a YAML file and their places; raises ``ConfigError``."""
    import yaml  # half a megabyte, which an agent without a file does not need

    try:
        with open_file(path) as file:
            content = file.read(MAX_FILE + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > MAX_FILE:
        raise ConfigError(f"{path}: more than {MAX_FILE} bytes: is this the right file?")
    document, loader = _Document(path), getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        document.check(yaml.parse(content, Loader=loader))
        root = yaml.compose(content, Loader=loader)
    except yaml.YAMLError as error:
        raise ConfigError.of([_not_yaml(error, content, path)]) from error
    values = document.value(root, "") if root is not None else None
    if document.mistakes:
        raise ConfigError.of(document.mistakes)
    if values is not None and not isinstance(values, dict):
        kind = (
            "a list: leave out the `- ` before them"
            if isinstance(values, list)
            else "text: write `key: value`"
        )
        begin = ConfigPlace(str(path), 1, 1)
        raise ConfigError.of([Mistake(begin, "", f"expected sections such as `imds:`, got {kind}")])
    return values or {}, document.places


class _Document:
    """The values of a file, their places, and its mistakes."""

    def __init__(self, path: Path) -> None:
        self.places = Places({"": ConfigPlace(str(path))})
        self.mistakes: list[Mistake] = []
        self._path = path

    def check(self, events: Iterable[Any]) -> None:
        """Raise ``ConfigError`` for a document that must not be composed.

        libyaml's composer crashes the process on a stack overflow. Aliases and merge keys can make
        gigabytes from a few hundred bytes, and tags can create objects.
        """
        depth = -2  # the stream and the document are not values
        for number, event in enumerate(events):
            kind = type(event).__name__
            depth += kind.endswith("StartEvent") - kind.endswith("EndEvent")
            wrong = ""
            if number > MAX_EVENTS:
                wrong = f"more than {MAX_EVENTS} values: is this the right file?"
            elif depth > MAX_DEPTH:
                wrong = f"lists and mappings are nested more than {MAX_DEPTH} deep"
            elif kind == "DocumentStartEvent" and number > 1:
                wrong = "one file holds one configuration: remove the line `---`"
            elif kind == "AliasEvent" or getattr(event, "value", "") == "<<":
                wrong = (
                    "aliases (*name) and merge keys (<<) are not supported: write the values out"
                )
            elif getattr(event, "tag", None) is not None:
                # it may be a password
                wrong = "tags (!name) are not supported: quote the value if it is a text"
            if wrong:
                raise ConfigError.of([Mistake(self._place(event), "", wrong)])

    def value(self, node: Any, path: str) -> Any:
        """Return the value of a node."""
        if isinstance(node.value, str):
            if "\0" in node.value:
                self.mistakes.append(Mistake(self._place(node), path, "it holds a NUL byte"))
            return None if node.value in NOTHING and not node.style else node.value
        if node.id == "sequence":
            return [
                self._below(f"{path}[{number}]", one, one) for number, one in enumerate(node.value)
            ]
        found: dict[str, Any] = {}
        for key, one in node.value:
            name = str(key.value)
            below = f"{path}.{meant(name)}".lstrip(".")
            if key.id != "scalar" or not name.isprintable() or not 0 < len(name) <= LONGEST_KEY:
                text = "expected one line of text as the name of a section or key"
                self.mistakes.append(Mistake(self._place(key), "", text))
            elif name in found:
                self.mistakes.append(
                    Mistake(
                        self._place(key), below, f"it is given twice: first at {self.places[below]}"
                    )
                )
            else:
                found[name] = self._below(below, key, one)
        return found

    def _below(self, path: str, begin: Any, node: Any) -> Any:
        self.places[path] = self._place(begin)
        return self.value(node, path)

    def _place(self, begin: Any) -> ConfigPlace:
        return ConfigPlace(str(self._path), begin.start_mark.line + 1, begin.start_mark.column + 1)


def _not_yaml(error: Any, content: bytes, path: Path) -> Mistake:
    """Return PyYAML's error as a mistake with its place."""
    said = str(
        getattr(error, "problem", None) or getattr(error, "reason", None) or error
    ).removeprefix("but ")
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        place = ConfigPlace(str(path), mark.line + 1, mark.column + 1)
    else:  # a byte that is not text: this error has a position
        before = content[: getattr(error, "position", 0)]
        place = ConfigPlace(str(path), before.count(b"\n") + 1, len(before) - before.rfind(b"\n"))
    tabs = ": indent with spaces, not with tabs" if re.search(rb"(?m)^ *\t", content) else ""
    return Mistake(place, "", f"this is not YAML: {' '.join(said.split())}{tabs}")
