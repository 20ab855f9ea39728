"""A YAML file -> values, and values -> structs. Each error names the file, the line and the key."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, get_args, get_origin

import msgspec

from notbefore.config.secret import Secret
from notbefore.core.duration import Duration
from notbefore.errors import ConfigError

MAX_FILE: Final = 1024 * 1024  # bytes
Part = TypeVar("Part")


def read(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a YAML file's values, and the place (``file:line``) of each dotted path in it; raises ``ConfigError``."""
    import yaml  # noqa: PLC0415 - half a megabyte that an agent without a file does not need

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE + 1)
        if len(text) > MAX_FILE:
            raise ConfigError(f"{path}: more than {MAX_FILE} bytes: is this the right file?")
        node = yaml.compose(text, Loader=loader)
        values = yaml.load(text, Loader=loader)  # noqa: S506 - both loaders above are safe ones
        places = {"": str(path)}
        _note_places(node, path, "", places)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    # the last four are what a tag such as `!!bool` on a text that is none ends in
    except (yaml.YAMLError, RecursionError, ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        raise ConfigError(f"{path}: this is not YAML: {' '.join(str(error).split())}") from error
    if values is None:
        return {}, places
    if not isinstance(values, dict):
        raise ConfigError(f"{path}:1: expected sections such as `imds:`, got {type(values).__name__}")
    return values, places


def _note_places(node: Any, file: Path, above: str, places: dict[str, str]) -> None:
    for key, value in node.value if node is not None and node.id == "mapping" else ():
        place = f"{file}:{key.start_mark.line + 1}"
        if key.tag != "tag:yaml.org,2002:str":
            raise ConfigError(f"{place}: expected text as the name of a section or key, got {key.value!r}")
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
        message, _, where = str(error).partition(" - at `")
        below = where.rstrip("`").removeprefix("$").lstrip(".")
        unknown = re.search(r"unknown field `(\w+)`", message)
        key = ".".join(filter(None, (above, below, unknown[1] if unknown else "")))
        if message.startswith("Invalid enum value"):
            message += f", expected one of {', '.join(map(str, _choices(below, kind)))}"
        named = ".".join(filter(None, (key, message.partition(":")[0])))  # a struct names the key that it refuses
        place = places[named] if named in places else _nearest(places, key)
        raise ConfigError(f"{place}: {key or 'configuration'}: {message}") from None


def _nearest(places: dict[str, str], dotted: str) -> str:
    """Return the place of a key, or of the nearest section around it."""
    while dotted and dotted not in places:
        dotted = dotted[: max(dotted.rfind("."), dotted.rfind("["), 0)]
    return places.get(dotted, "the configuration")


def _choices(dotted: str, root: type) -> list[Any]:
    """Return the values that the ``Literal`` at this path allows."""
    kind: Any = root
    for key in re.sub(r"\[\d+\]", "", dotted).split("."):
        if get_origin(kind) is dict:
            kind = get_args(kind)[1]
            continue
        struct = next(part for part in _parts(kind) if hasattr(part, "__struct_fields__"))
        kind = next(field.type for field in msgspec.structs.fields(struct) if field.encode_name == key)
    return [value for part in _parts(kind) if get_origin(part) is Literal for value in get_args(part)]


def _parts(kind: Any) -> Iterator[Any]:
    """Return a type, and the types that it is made of: of ``tuple[A, ...] | None`` also A."""
    yield kind
    for part in get_args(kind):
        yield from _parts(part)


def _decode(kind: type, value: object) -> object:
    if kind is Duration:
        return Duration(value)
    if kind is Secret:
        return Secret.read(value)
    raise NotImplementedError(kind)  # a new type in a struct, and this function does not know it: a bug
