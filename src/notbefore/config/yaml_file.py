"""A YAML file -> values, and the place of each; every mistake names line and column."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from notbefore.config.open_file import open_file
from notbefore.errors import ConfigError, Mistake, Place

MAX_FILE: Final = 256 * 1024  # bytes; a configuration with a hundred sinks has 30 KiB
MAX_DEPTH: Final = 32  # of lists and mappings within each other; the deepest key of ours is at 8
MAX_NODES: Final = 20_000
MAX_NUMBER: Final = 1_000  # characters; Python refuses to print an integer of more than 4,300 digits
NUMERIC: Final = "0123456789+-."
_ADVICE: Final = (  # a part of what libyaml or PyYAML says, and what to do about it
    (
        ("unknown escape character", "hexdecimal number", "hexadecimal numbers"),
        r"in double quotes a backslash begins an escape: write a Windows path in single quotes, 'C:\ProgramData\key'",
    ),
    (("mapping values are not allowed",), "a text that holds `: ` needs quotes, and each key a line of its own"),
    (
        ("could not find expected ':'", "expected <block end>", "did not find expected key", "but found '<block"),
        "keys of one section begin in the same column, each with a colon and a space after it: `key: value`",
    ),
    (
        ("expected ',' or", "unexpected end of stream", "did not find expected node content", "while parsing a flow"),
        "a quote or a bracket is opened and not closed, or a comma is missing",
    ),
    (("found another document",), "one file holds one configuration: remove the line `---`"),
    (("control characters", "special characters", "acceptable"), "a byte in it is no text: is this the right file?"),
    (
        ("cannot start any token", "did not find expected alphabetic", "undefined alias"),
        "a value that begins with one of @ ` % * & ! | > needs quotes",
    ),
)


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

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    text = _read_text(path)
    try:
        _check_bounds(yaml.parse(text, Loader=loader), path)
        node = yaml.compose(text, Loader=loader)
    except yaml.YAMLError as error:
        raise ConfigError.of([_not_yaml(error, text, path)]) from error
    found = _Values(path, yaml.constructor.SafeConstructor())
    values = found.of(node, "") if node is not None else None
    if found.mistakes:
        raise ConfigError.of(found.mistakes)
    if values is None:
        return {}, found.places
    if not isinstance(values, dict):
        kind = "a list: leave out the `- ` before them" if isinstance(values, list) else "text: write `key: value`"
        raise ConfigError(f"{path}:1:1: expected sections such as `imds:`, got {kind}")
    return values, found.places


class _Values:
    """Makes values of PyYAML's nodes, and notes where each stands."""

    def __init__(self, path: Path, constructor: Any) -> None:
        self.places = Places({"": Place(str(path))})
        self.mistakes: list[Mistake] = []
        self._path = path
        self._constructor = constructor

    def of(self, node: Any, dotted: str) -> Any:
        """Return the value of a node."""
        if node.id == "mapping":
            return {str(key.value): self._below(key, value, dotted) for key, value in node.value}
        if node.id == "sequence":
            return [self._placed(item, item, f"{dotted}[{number}]") for number, item in enumerate(node.value)]
        if "\0" in node.value:
            self.mistakes.append(Mistake(self._place(node), dotted, "a NUL byte stands in it: it ends no text of ours"))
            return None
        if node.tag == "tag:yaml.org,2002:value":  # a bare `=`, which YAML 1.1 reserves
            return node.value
        try:
            return self._constructor.construct_object(node)
        except (ValueError, OverflowError):  # a date such as 2026-99-99
            text = f"{node.value[:40]!r} is a date that does not exist: put quotes around what is to be text"
            self.mistakes.append(Mistake(self._place(node), dotted, text))
            return None

    def _below(self, key: Any, value: Any, dotted: str) -> Any:
        name = f"{dotted}.{str(key.value)[:MAX_NUMBER]}".lstrip(".")
        if key.tag != "tag:yaml.org,2002:str" or not key.value.isprintable():
            text = f"expected one line of text as the name of a section or key, got {key.value!r:.80}"
            self.mistakes.append(Mistake(self._place(key), "", text))
        elif name in self.places:  # YAML would silently take the last one
            self.mistakes.append(Mistake(self._place(key), name, f"it is given twice: first at {self.places[name]}"))
        return self._placed(key, value, name)

    def _placed(self, at: Any, node: Any, dotted: str) -> Any:
        self.places.setdefault(dotted, self._place(at))
        return self.of(node, dotted)

    def _place(self, node: Any) -> Place:
        return _place(self._path, node.start_mark)


def _place(path: Path, mark: Any) -> Place:
    return Place(str(path), mark.line + 1, mark.column + 1)


def _not_yaml(error: Any, text: str, path: Path) -> Mistake:
    """Return what PyYAML refuses, as a sentence, and what to do about it."""
    mark = getattr(error, "problem_mark", None)
    said = " ".join(str(getattr(error, "problem", None) or getattr(error, "reason", None) or error).split())
    if mark is None:  # a byte that is no text; of such an error the position is known, and no mark
        before = text[: getattr(error, "position", 0)]
        place = Place(str(path), before.count("\n") + 1, len(before) - before.rfind("\n"))
    else:
        place = _place(path, mark)
    line = text.splitlines()[place.line - 1] if 0 < place.line <= len(text.splitlines()) else ""
    if "cannot start any token" in said and line[place.column - 1 : place.column] == "\t":
        return Mistake(place, "", "this is not YAML: lines are indented with spaces: replace the tab")
    about = f"{getattr(error, 'context', None) or ''} {said}"
    advice = next((advice for parts, advice in _ADVICE if any(part in about for part in parts)), "")
    return Mistake(place, "", f"this is not YAML: {said.removeprefix('but ')}" + (f": {advice}" if advice else ""))


def _read_text(path: Path) -> str:
    try:
        with open_file(path) as file:
            content = file.read(MAX_FILE + 1)
    except IsADirectoryError:
        raise ConfigError(f"{path}: this is a directory: name the file in it") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > MAX_FILE:
        raise ConfigError(f"{path}: more than {MAX_FILE} bytes: is this the right file?")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: this is not UTF-8 text: save the file as UTF-8") from None


def _check_bounds(events: Iterable[Any], path: Path) -> None:
    """Raise ``ConfigError`` for a file that would cost too much to load.

    ``events`` are those of ``yaml.parse``, which needs no recursion. libyaml's composer does, and crashes the process
    where the stack ends. Aliases and merge keys can make gigabytes out of a few hundred bytes.
    """
    depth = 0
    for number, event in enumerate(events):
        place = _place(path, event.start_mark)
        kind = type(event).__name__
        depth += kind.endswith("StartEvent")
        depth -= kind.endswith("EndEvent")
        if number > MAX_NODES:
            raise ConfigError(f"{place}: more than {MAX_NODES} values: is this the right file?")
        if depth > MAX_DEPTH + 2:  # the stream and the document count as well
            raise ConfigError(f"{place}: lists and mappings are nested more than {MAX_DEPTH} deep")
        if kind == "AliasEvent" or (kind == "ScalarEvent" and event.value == "<<"):
            raise ConfigError(f"{place}: aliases (*name) and merge keys (<<) are not supported: write the values out")
        if getattr(event, "tag", None) is not None:
            raise ConfigError(f"{place}: tags ({event.tag}) are not supported: quote what is to be text")
        if kind == "ScalarEvent" and not event.style and len(event.value) > MAX_NUMBER and event.value[0] in NUMERIC:
            raise ConfigError(f"{place}: a number of more than {MAX_NUMBER} digits; quote what is to be text")
