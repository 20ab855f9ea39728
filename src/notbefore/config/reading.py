"""Makes structs from the values of a file, of variables and of arguments, by field types.

Finds all mistakes at once.

It accepts several ways of writing: ``KEY_file``, ``KEY_env`` and ``KEY_credential`` for a secret,
one text for a list with one item, and a path relative to the file that contains it.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Struct

from notbefore.config.constraints import Constraint
from notbefore.config.secret import SOURCES, Secret
from notbefore.config.shown import meant, missing_blank, shown
from notbefore.config.yaml_file import Places, Variable, read
from notbefore.core.duration import Duration
from notbefore.core.text import one_of
from notbefore.errors import ConfigError, Mistake

Part = TypeVar("Part")
Made = Callable[[str, Any], Iterable[str]]
WRONG: Final[Any] = object()  # replaces a value with a mistake
LONGEST_SHOWN: Final = 40  # characters of a wrong text; a longer one may be a secret
NOTHING: Final = "the value is empty: write one, or leave the line out for the default"
SECTION: Final = "keys with values below it, `key: value`"
LIST: Final = "a list, [ONE, TWO] or lines that begin with `- `"
WORDS: Final = {str: "text", int: "a whole number", bool: "true or false"}


class Kind(NamedTuple):
    """A type without its annotations and without ``None``."""

    of: Any
    constraints: tuple[Constraint, ...]
    least: int  # items of a list
    struct: type[Struct] | None  # the struct that it is or may be
    choices: tuple[str, ...]  # of the ``Literal`` that it is or may be


def read_struct(path: Path, kind: type[Part]) -> Part:
    """Return a whole YAML file as a struct; raises ``ConfigError`` with all its mistakes."""
    values, places = read(path)
    reader = Reader(places, path.absolute().parent)
    made: Part = reader.read(values, kind)
    if reader.mistakes:
        raise ConfigError.of(reader.mistakes)
    return made


class Reader(Struct, frozen=True):
    """Makes structs, and collects ``mistakes``."""

    places: Places
    base: Path  # the directory for relative paths
    environment: Mapping[str, str] | None = None  # without it, secrets and named files are not read
    made: Made = lambda _path, _struct: ()  # (path, struct) -> further mistakes of the struct
    mistakes: list[Mistake] = []

    def read(self, value: Any, annotation: Any, path: str = "") -> Any:
        """Return the value converted to its type, or ``WRONG``."""
        kind = kind_of(annotation)
        if value is None and kind.struct is None and NoneType in get_args(annotation):
            return None  # but not for a section: an empty one is probably unfinished
        try:
            found = self._converted(value, kind, path)
            if found is not WRONG:
                self._check(found, kind)
        except (ValueError, ConfigError) as error:
            return self._mistake(path, str(error))
        return found

    def _mistake(self, path: str, text: str) -> Any:
        """Add a mistake at a path.

        ``text`` may begin with the name of a key below the path and ``: ``.
        """
        name, colon, rest = text.partition(": ")
        if colon and re.fullmatch(r"[a-z]\w*(?:\.\w+)*", name, re.ASCII):
            path, text = _below(path, name), rest
        self.mistakes.append(Mistake(self.places.nearest(path), path, text))
        return WRONG

    def _converted(self, value: Any, kind: Kind, path: str) -> Any:
        """Convert a value; raises ``ValueError`` if it has another form than its type."""
        if kind.struct is not None and (isinstance(value, dict) or kind.of is kind.struct):
            return self._struct(value, kind.struct, path)
        if get_origin(kind.of) is tuple:
            return self._list(value, kind, path)
        if get_origin(kind.of) is dict:
            return self._mapping(value, kind, path)
        return self._secret(value) if kind.of is Secret else _scalar(value, kind)

    def _check(self, value: Any, kind: Kind) -> None:
        for one in kind.constraints:
            if self.environment is not None:
                one.check(value.reveal(self.environment) if isinstance(value, Secret) else value)
            elif not (one.looks or isinstance(value, Secret)):
                one.check(value)

    def _mapping(self, values: Any, kind: Kind, path: str) -> dict[Any, Any]:
        if not isinstance(values, dict):
            raise _unlike(values, SECTION)
        of_key, of_value = get_args(kind.of)
        mapping: dict[Any, Any] = {}
        for key, value in values.items():
            below = _below(path, key)
            if value is None:
                below = _below(path, shown(key))  # the key may be the value
            if value is None and missing_blank(key):
                self._mistake(below, missing_blank(key))
                continue
            read_key = self.read(key, of_key, below)
            read_value = self.read(value, of_value, below)
            if read_key is not WRONG and read_value is not WRONG:
                mapping[read_key] = read_value
        return mapping

    def _struct(self, values: Any, kind: type[Struct], path: str) -> Any:
        if not isinstance(values, dict):
            raise _unlike(values, SECTION)
        fields = fields_of(kind)
        found: dict[str, Any] = {}
        set_after = {
            self._named(key, value, fields)[0]
            for key, value in values.items()
            if isinstance(value, Variable)
        }
        for key, value in values.items():
            name, given = self._named(key, value, fields)
            if name in set_after and not isinstance(value, Variable):
                continue  # `url_file` in the file, and the variable of `url`: the variable wins
            if name not in fields:
                found[key] = self._mistake(_below(path, shown(key)), _unknown(key, kind, path))
            elif name in found:
                found[name] = self._mistake(
                    _below(path, key), f"{name} is given twice: leave one of the two out"
                )
            else:
                found[name] = self.read(given, fields[name].type, _below(path, key))
        for name, one in fields.items():
            if (
                one.required and name not in found and found.keys() <= fields.keys()
            ):  # else a key may be misspelt
                found[name] = self._mistake(path, f"the key `{name}` is missing")
        if path and WRONG in found.values():
            return WRONG
        # at the top level, the struct is made from the valid values
        return self._make(
            kind, {fields[name].name: one for name, one in found.items() if one is not WRONG}, path
        )

    def _named(self, key: str, value: Any, fields: Mapping[str, Any]) -> tuple[str, Any]:
        """Return the field that a key is for, and its value.

        The path of a file is made relative to ``base``.
        """
        name, _, source = key.rpartition("_")
        if source in SOURCES and name in fields and kind_of(fields[name].type).of is Secret:
            return name, {source: value}
        if key.endswith("_file") and isinstance(value, str):
            return key, str(self.base / value)
        return key, value

    def _make(self, kind: type[Struct], given: dict[str, Any], path: str) -> Any:
        try:
            made = kind(**given)
            texts = list(self.made(path, made))
        except ValueError as error:  # from a rule about several keys
            texts = str(error).splitlines()
        for text in texts:
            self._mistake(path, text)
        return WRONG if texts else made

    def _secret(self, value: Any) -> Secret:
        if isinstance(value, dict) and isinstance(value.get("file"), str):
            value = value | {"file": str(self.base / value["file"])}
        secret = Secret.read(value)
        if self.environment is not None:
            secret.reveal(self.environment)
        return secret

    def _list(self, value: Any, kind: Kind, path: str) -> Any:
        """Make a tuple. A single text needs no brackets."""
        item = get_args(kind.of)[0]
        if isinstance(value, Variable):
            value = [one.strip() for one in value.split(",")]
        elif isinstance(value, str) and kind_of(item).struct is None:
            value = [value]
        if not isinstance(value, list):
            raise _unlike(value, LIST)
        if len(value) < kind.least:
            raise ValueError("expected at least one")
        found = tuple(self.read(one, item, f"{path}[{number}]") for number, one in enumerate(value))
        return WRONG if WRONG in found else found


@cache
def fields_of(kind: type[Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    """Return the fields of a struct by the names of their keys."""
    return {one.encode_name: one for one in msgspec.structs.fields(kind)}


@cache
def kind_of(annotation: Any) -> Kind:
    """Return the ``Kind`` of an annotation."""
    union = get_origin(annotation) in (Union, UnionType)
    parts = [one for one in get_args(annotation) if one is not NoneType] if union else [annotation]
    of, notes = parts[0] if len(parts) == 1 else annotation, list[Any]()
    if get_origin(of) is Annotated:
        of, *notes = get_args(of)
    constraints = tuple(one for one in notes if isinstance(one, Constraint))
    least = max((getattr(one, "min_length", 0) for one in notes), default=0)
    struct = next(
        (one for one in (of, *parts) if isinstance(one, type) and issubclass(one, Struct)), None
    )
    choices = next((get_args(one) for one in parts if get_origin(one) is Literal), ())
    return Kind(of, constraints, least, struct, choices)


def _scalar(value: Any, kind: Kind) -> Any:
    if not isinstance(value, str):
        raise _unlike(value, WORDS.get(kind.of, "text"))
    if kind.choices and value not in kind.choices:
        word = shown(value)
        raise ValueError(f"there is no {word!r} here{one_of(word, kind.choices)}")
    if kind.of is Duration:
        return Duration(value)
    if kind.of not in (int, bool):
        return str(value)
    try:
        return msgspec.convert(str(value), kind.of, strict=False)
    except msgspec.ValidationError:
        raise _unlike(value, WORDS[kind.of]) from None


def _below(path: str, key: object) -> str:
    name = meant(str(key))
    return f"{path}.{name}" if path else name


def _unknown(key: str, kind: type[Struct], path: str) -> str:
    """Return the text about an unknown key of a struct, with the key that was probably meant."""
    hint = missing_blank(key)
    if hint:
        return hint

    fields, own = fields_of(kind), path.rpartition(".")[2]
    if path == f"sinks.{own}" and own in fields:
        return f"the kind needs a name of your choice before it: `sinks: {{NAME: {{{own}: ...}}}}`"
    expected = list(fields)
    for name, field in fields.items():
        if kind_of(field.type).of is Secret:
            expected += [f"{name}_{source}" for source in SOURCES]
    return f"there is no such key here{one_of(shown(key), expected)}"


def _unlike(value: Any, expected: str) -> ValueError:
    """Return the error for a value of another form.

    A long text may be a secret, so it is not shown.
    """
    if value is None:
        return ValueError(NOTHING)
    if isinstance(value, str):
        got = (
            repr(str(value))
            if expected in WORDS.values() and len(value) <= LONGEST_SHOWN
            else "text"
        )
    else:
        got = "a list" if isinstance(value, list) else "keys with values"
    return ValueError(f"expected {expected}, got {got}")
