"""A YAML file -> values, and the place of each; every mistake names line and column.

Every value is a text, or nothing: whether it is a number or a truth, the type of its key decides. So `name: no` is a
name, and `api_version: 2020-07-01` is no date.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from notbefore.errors import ConfigError, Mistake, Place

MAX_FILE: Final = 256 * 1024  # bytes; a configuration with a hundred sinks has 30 KiB
MAX_DEPTH: Final = 32  # of lists and mappings within each other; the deepest key of ours is at 8
MAX_EVENTS: Final = 20_000  # of the parser: each value is one, a list or a mapping two
LONGEST_KEY: Final = 200  # characters
NOTHING: Final = ("", "~", "null", "Null", "NULL")  # YAML's words for no value


class Variable(str):
    """A text from the environment or the command line: there a list is one text with commas."""

    __slots__ = ()


class Places(dict[str, Place]):
    """Where each dotted path was given; "" stands for the whole configuration."""

    def nearest(self, path: str) -> Place:
        """Return the place of a path, of the nearest section around it, or of the whole configuration."""
        while path and path not in self:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return self.get(path) or self.get("") or Place("the configuration")


def read(path: Path) -> tuple[dict[str, Any], Places]:
    """Return a YAML file's values and their places; raises ``ConfigError``."""
    import yaml  # noqa: PLC0415 - half a megabyte that an agent without a file does not need

    text = _read_text(path)
    document = _Document(path, yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    try:
        values = document.read()
    except yaml.YAMLError as error:
        raise ConfigError.of([_not_yaml(error, text, path)]) from error
    if document.mistakes:
        raise ConfigError.of(document.mistakes)
    if values is not None and not isinstance(values, dict):
        kind = "a list: leave out the `- ` before them" if isinstance(values, list) else "text: write `key: value`"
        raise ConfigError.of([Mistake(Place(str(path), 1, 1), "", f"expected sections such as `imds:`, got {kind}")])
    return values or {}, document.places


class _Document:
    """Makes values of the parser's events, within bounds.

    The events need no recursion in libyaml; its composer does, and crashes the process where the stack ends. Aliases
    and merge keys can make gigabytes out of a few hundred bytes, and tags can make objects: all are refused.
    """

    def __init__(self, path: Path, events: Iterator[Any]) -> None:
        self.places = Places({"": Place(str(path))})
        self.mistakes: list[Mistake] = []
        self._path = path
        self._events = enumerate(events)

    def read(self) -> Any:
        """Return the value of the only document, or ``None``; raises ``YAMLError`` and ``ConfigError``."""
        values = None
        for number, event in self._events:
            kind = type(event).__name__
            if kind == "DocumentStartEvent":
                if number > 1:
                    raise self._wrong(event, "one file holds one configuration: remove the line `---`")
                values = self._value(self._next(), "", 0)
        return values

    def _next(self) -> Any:
        number, event = next(self._events)
        wrong = ""
        if number > MAX_EVENTS:
            wrong = f"more than {MAX_EVENTS} values: is this the right file?"
        elif type(event).__name__ == "AliasEvent" or getattr(event, "value", "") == "<<":
            wrong = "aliases (*name) and merge keys (<<) are not supported: write the values out"
        elif getattr(event, "tag", None) is not None:
            wrong = "tags (!name) are not supported: quote what is to be text"  # it may be a password
        if wrong:
            raise self._wrong(event, wrong)
        return event

    def _value(self, event: Any, dotted: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise self._wrong(event, f"lists and mappings are nested more than {MAX_DEPTH} deep")
        kind = type(event).__name__
        if kind == "MappingStartEvent":
            return self._mapping(dotted, depth + 1)
        if kind == "SequenceStartEvent":
            return self._sequence(dotted, depth + 1)
        if "\0" in event.value:
            self.mistakes.append(Mistake(self._place(event), dotted, "it holds a NUL byte"))
        return None if event.value in NOTHING and not event.style else event.value

    def _sequence(self, dotted: str, depth: int) -> list[Any]:
        found: list[Any] = []
        while type(event := self._next()).__name__ != "SequenceEndEvent":
            path = f"{dotted}[{len(found)}]"
            self.places[path] = self._place(event)
            found.append(self._value(event, path, depth))
        return found

    def _mapping(self, dotted: str, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while type(event := self._next()).__name__ != "MappingEndEvent":
            place, key = self._place(event), self._value(event, dotted, depth)
            path = f"{dotted}.{key}".lstrip(".")
            if not isinstance(key, str) or not key.isprintable() or len(key) > LONGEST_KEY:
                text = f"expected one line of text as the name of a section or key, got {key!r:.80}"
                self.mistakes.append(Mistake(place, "", text))
            elif key in found:
                self.mistakes.append(Mistake(place, path, f"it is given twice: first at {self.places[path]}"))
            self.places.setdefault(path, place)
            found[str(key)] = self._value(self._next(), path, depth)
        return found

    def _wrong(self, event: Any, text: str) -> ConfigError:
        """Return the error after which nothing is read, with the mistakes before it."""
        return ConfigError.of([*self.mistakes, Mistake(self._place(event), "", text)])

    def _place(self, event: Any) -> Place:
        return Place(str(self._path), event.start_mark.line + 1, event.start_mark.column + 1)


def _not_yaml(error: Any, text: str, path: Path) -> Mistake:
    """Return what PyYAML refuses, with its place."""
    said = str(getattr(error, "problem", None) or getattr(error, "reason", None) or error).removeprefix("but ")
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        place = Place(str(path), mark.line + 1, mark.column + 1)
    else:  # a byte that is no text: of such an error the position is known
        before = text[: getattr(error, "position", 0)]
        place = Place(str(path), before.count("\n") + 1, len(before) - before.rfind("\n"))
    tabs = ": indent with spaces, not with tabs" if re.search(r"(?m)^ *\t", text) else ""
    return Mistake(place, "", f"this is not YAML: {' '.join(said.split())}{tabs}")


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > MAX_FILE:
        raise ConfigError(f"{path}: more than {MAX_FILE} bytes: is this the right file?")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: this is not UTF-8 text: save the file as UTF-8") from None
