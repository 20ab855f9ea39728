"""Reads a YAML file: its values, and the place of each. Every mistake names line and column.

Every value is a text or ``None``. The type of its key decides later whether it is a number or a
boolean: `name: no` is a name, and `api_version: 2020-07-01` is not a date.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import yaml

from notbefore.config.regular_file import open_file
from notbefore.config.shown import meant
from notbefore.errors import ConfigError, ConfigPlace, Mistake

MAX_FILE: Final = 256 * 1024  # bytes; a configuration with a hundred sinks has 30 KiB
MAX_DEPTH: Final = 32  # levels of lists and mappings; our deepest key is at level 8
MAX_PARSER_EVENTS: Final = 20_000  # of the parser: one for each value, two for a list or a mapping
LONGEST_KEY: Final = 200  # characters
NO_VALUE: Final = ("", "~", "null", "Null", "NULL")  # YAML's words for no value
STARTS: Final = (
    yaml.StreamStartEvent,
    yaml.DocumentStartEvent,
    yaml.SequenceStartEvent,
    yaml.MappingStartEvent,
)
ENDS: Final = (
    yaml.StreamEndEvent,
    yaml.DocumentEndEvent,
    yaml.SequenceEndEvent,
    yaml.MappingEndEvent,
)


class Variable(str):
    """A text from the environment or the command line. There, a list is a text with commas."""

    __slots__ = ()


class Places(dict[str, ConfigPlace]):
    """The place of each dotted path; "" is the path of the whole configuration."""

    def nearest(self, path: str) -> ConfigPlace:
        """Return the place of a path, or of the nearest section around it.

        Without such a section, it is the place of the whole configuration.
        """
        candidate = path
        while candidate and candidate not in self:
            end_of_section = max(candidate.rfind("."), candidate.rfind("["), 0)
            candidate = candidate[:end_of_section]
        return self.get(candidate, ConfigPlace("the configuration"))


def read(path: Path) -> tuple[dict[str, Any], Places]:
    """Return the values of a YAML file and their places; raises ``ConfigError``."""
    content = _content_of(path)
    document = _Document(path)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # without libyaml, the slower one
    try:
        document.check(yaml.parse(content, Loader=loader))
        root = yaml.compose(content, Loader=loader)
    except yaml.YAMLError as error:
        raise ConfigError.of([_not_yaml(error, content, path)]) from error

    values = None
    if root is not None:
        values = document.value(root, "")
    if document.mistakes:
        raise ConfigError.of(document.mistakes)
    if values is not None and not isinstance(values, dict):
        raise ConfigError.of([_no_sections(values, path)])
    return values or {}, document.places


def _content_of(path: Path) -> bytes:
    try:
        with open_file(path) as file:
            content = file.read(MAX_FILE + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > MAX_FILE:
        raise ConfigError(f"{path}: more than {MAX_FILE} bytes: is this the right file?")
    return content


def _no_sections(values: object, path: Path) -> Mistake:
    """Return the mistake of a file that is a list or a text."""
    advice = "text: write `key: value`"
    if isinstance(values, list):
        advice = "a list: leave out the `- ` before them"
    start = ConfigPlace(str(path), 1, 1)
    return Mistake(start, "", f"expected sections such as `imds:`, got {advice}")


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
            if isinstance(event, STARTS):
                depth += 1
            elif isinstance(event, ENDS):
                depth -= 1
            problem = _problem(event, number, depth)
            if problem:
                raise ConfigError.of([Mistake(self._place(event), "", problem)])

    def value(self, node: Any, path: str) -> Any:
        """Return the value of a node."""
        if isinstance(node, yaml.ScalarNode):
            return self._text(node, path)
        if isinstance(node, yaml.SequenceNode):
            items: list[Any] = []
            for index, item in enumerate(node.value):
                items.append(self._placed(f"{path}[{index}]", item, item))
            return items
        return self._mapping(node, path)

    def _text(self, node: Any, path: str) -> str | None:
        text: str = node.value
        if "\0" in text:
            self.mistakes.append(Mistake(self._place(node), path, "it holds a NUL byte"))
        is_quoted = bool(node.style)
        if text in NO_VALUE and not is_quoted:
            return None
        return text

    def _mapping(self, node: Any, path: str) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for key, value in node.value:
            name = str(key.value)
            below = f"{path}.{meant(name)}".lstrip(".")
            if not _is_name(key):
                text = "expected one line of text as the name of a section or key"
                if key.id == "mapping":
                    text += ": in YAML, `{` begins a mapping: write a template in quotes"
                self.mistakes.append(Mistake(self._place(key), "", text))
            elif name in mapping:
                text = f"it is given twice: first at {self.places[below]}"
                self.mistakes.append(Mistake(self._place(key), below, text))
            else:
                mapping[name] = self._placed(below, key, value)
        return mapping

    def _placed(self, path: str, begin: Any, node: Any) -> Any:
        """Return the value of a node, and note that it begins at ``begin``."""
        self.places[path] = self._place(begin)
        return self.value(node, path)

    def _place(self, begin: Any) -> ConfigPlace:
        return ConfigPlace(str(self._path), begin.start_mark.line + 1, begin.start_mark.column + 1)


def _is_name(key: Any) -> bool:
    if not isinstance(key, yaml.ScalarNode):
        return False
    return key.value.isprintable() and 0 < len(key.value) <= LONGEST_KEY


def _problem(event: Any, number: int, depth: int) -> str:
    """Return why an event of the parser is not accepted; empty if it is.

    A tag is not shown: it may be a password.
    """
    if number > MAX_PARSER_EVENTS:
        return f"more than {MAX_PARSER_EVENTS} values: is this the right file?"
    if depth > MAX_DEPTH:
        return f"lists and mappings are nested more than {MAX_DEPTH} deep"
    if isinstance(event, yaml.DocumentStartEvent) and number > 1:
        return "one file holds one configuration: remove the line `---`"
    if isinstance(event, yaml.AliasEvent) or getattr(event, "value", "") == "<<":
        return "aliases (*name) and merge keys (<<) are not supported: write the values out"
    if getattr(event, "tag", None) is not None:
        return "tags (!name) are not supported: quote the value if it is a text"
    return ""


def _not_yaml(error: Any, content: bytes, path: Path) -> Mistake:
    """Return PyYAML's error as a mistake with its place."""
    problem = str(error)
    for attribute in ("reason", "problem"):  # of the reader's and of the parser's errors
        problem = getattr(error, attribute, None) or problem
    text = " ".join(problem.removeprefix("but ").split())
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        place = ConfigPlace(str(path), mark.line + 1, mark.column + 1)
    else:  # a byte that is not text: this error has a position
        before = content[: getattr(error, "position", 0)]
        place = ConfigPlace(str(path), before.count(b"\n") + 1, len(before) - before.rfind(b"\n"))
    hint = ""
    if re.search(rb"(?m)^ *\t", content):
        hint = ": indent with spaces, not with tabs"
    return Mistake(place, "", f"this is not YAML: {text}{hint}")
