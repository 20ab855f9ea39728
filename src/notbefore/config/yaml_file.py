"""A YAML file -> values, and values -> structs. Each error names the file, the line and the key."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from notbefore.config.open_file import open_file
from notbefore.config.secret import Secret
from notbefore.core.duration import Duration
from notbefore.errors import ConfigError

MAX_FILE: Final = 256 * 1024  # bytes; a configuration with a hundred sinks has 30 KiB
MAX_DEPTH: Final = 32  # of lists and mappings within each other; the deepest key of ours is at 8
MAX_NODES: Final = 20_000
MAX_NUMBER: Final = 1_000  # characters; Python refuses to print an integer of more than 4,300 digits
NUMERIC: Final = "0123456789+-."
Part = TypeVar("Part")


def read(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a YAML file's values, and the place (``file:line``) of each dotted path in it; raises ``ConfigError``."""
    import yaml  # noqa: PLC0415 - half a megabyte that an agent without a file does not need

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    text = _read_text(path)
    try:
        _check_bounds(yaml.parse(text, Loader=loader), path)
        node = yaml.compose(text, Loader=loader)
        values = yaml.load(text, Loader=loader)  # noqa: S506 - both loaders above are safe ones
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # the last two: a date such as 2026-99-99
        from notbefore.config.mistakes import yaml_sentence  # noqa: PLC0415 - only where there is one

        line, said = yaml_sentence(error, text)
        raise ConfigError(f"{path}:{line}: {said}" if line else f"{path}: {said}") from error
    places = {"": str(path)}
    if values is None:
        return {}, places
    if not isinstance(values, dict):
        raise ConfigError(f"{path}:1: expected sections such as `imds:`, got {_kind(values)}")
    _note_places(node, path, "", places)
    return values, places


def _kind(values: object) -> str:
    return "a list: leave out the `- ` before them" if isinstance(values, list) else "text: write `key: value`"


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
        place = f"{path}:{event.start_mark.line + 1}"
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


def _note_places(node: Any, file: Path, above: str, places: dict[str, str]) -> None:
    for key, value in node.value if node is not None and node.id == "mapping" else ():
        place = f"{file}:{key.start_mark.line + 1}"
        if key.tag != "tag:yaml.org,2002:str" or not key.value.isprintable():
            raise ConfigError(f"{place}: expected one line of text as the name of a section or key, got {key.value!r}")
        dotted = f"{above}.{key.value}".lstrip(".")
        if dotted in places:  # YAML would silently take the last one
            raise ConfigError(f"{place}: {dotted} is given twice: first at {places[dotted]}")
        places[dotted] = place
        _note_places(value, file, dotted, places)
        for number, item in enumerate(value.value if value.id == "sequence" else ()):
            places[f"{dotted}[{number}]"] = f"{file}:{item.start_mark.line + 1}"
            _note_places(item, file, f"{dotted}[{number}]", places)


def to_struct(values: Any, kind: type[Part], places: dict[str, str], *, strict: bool, above: str = "") -> Part:
    """Return the values as a struct of type ``kind``; raises ``ConfigError``, which names the key and its place.

    ``places`` says where each dotted path was given; "" stands for the whole configuration. ``above`` is the path of
    ``values`` in it.
    """
    try:
        return msgspec.convert(values, kind, strict=strict, dec_hook=_decode)
    except msgspec.ValidationError as error:
        from notbefore.config.mistakes import sentence  # noqa: PLC0415 - only where there is one

        message, _, where = str(error).partition(" - at `")
        where = where.removeprefix("key` in `")  # a key of a mapping: what holds it is named
        below = where.rstrip("`").removeprefix("$").lstrip(".")
        unknown = re.search(r"unknown field `(.+)`", message)
        key = ".".join(filter(None, (above, below, unknown[1] if unknown else "")))
        message = sentence(message, _value_at(values, below), below, kind)
        raise located(places, key, message) from None


def located(places: dict[str, str], key: str, message: str) -> ConfigError:
    """Return the error with its place; a ``message`` may begin with the name of a key below ``key``."""
    name, _, rest = message.partition(": ")
    if name.isidentifier():
        key, message = ".".join(filter(None, (key, name))), rest
    return ConfigError(f"{_nearest(places, key)}: {key or 'configuration'}: {message}")


def _value_at(values: Any, dotted: str) -> Any:
    """Return the value at a path such as ``routes[0].match``; what cannot be found is ``...``."""
    for name in re.findall(r"[^.\[\]]+|\.\.\.", dotted):
        try:
            values = values[int(name)] if isinstance(values, (list, tuple)) else values[name]
        except (KeyError, IndexError, ValueError, TypeError):
            return ...
    return values


def _nearest(places: dict[str, str], dotted: str) -> str:
    """Return the place of a key, of the nearest section around it, or of the whole configuration."""
    while dotted and dotted not in places:
        dotted = dotted[: max(dotted.rfind("."), dotted.rfind("["), 0)]
    return places.get(dotted) or places.get("", "the configuration")


def _decode(kind: type, value: object) -> object:
    if kind is Duration:
        return Duration(value)
    if kind is Secret:
        return Secret.read(value)
    raise NotImplementedError(kind)  # a new type in a struct, and this function does not know it: a bug
