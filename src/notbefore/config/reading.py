"""Converts the values of a file, of variables and of arguments to structs, by the types of their
fields.

It finds all mistakes at once. It accepts several notations: ``KEY_file``, ``KEY_env`` and
``KEY_credential`` for a secret, one text for a list with one item, and a path relative to the file
that contains it.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from notbefore.config.constraints import Constraint
from notbefore.config.secret import SOURCES, Secret
from notbefore.config.shown import meant, missing_blank, shown
from notbefore.config.yaml_file import Places, Variable, read
from notbefore.core.duration import Duration
from notbefore.core.text import one_of
from notbefore.errors import ConfigError, Mistake

Section = TypeVar("Section")
# (path, struct) -> the mistakes of the struct
StructCheck = Callable[[str, Struct], Iterable[str]]
WRONG: Final[Any] = object()  # replaces a value with a mistake
LONGEST_SHOWN: Final = 40  # characters of a wrong text; a longer one may be a secret
EMPTY_VALUE: Final = "the value is empty: write one, or leave the line out for the default"
SECTION: Final = "keys with values below it, `key: value`"
LIST: Final = "a list, [ONE, TWO] or lines that begin with `- `"
WORDS: Final = {str: "text", int: "a whole number", bool: "true or false"}
NUMBER: Final = re.compile(r"[-+]?\d+(?:\.\d+)?", re.ASCII)
# a key, or a path of keys, at the beginning of a mistake
KEY_PATH: Final = re.compile(r"[a-z]\w*(?:\.\w+)*", re.ASCII)


class ValueType(NamedTuple):
    """The type of a field, taken apart."""

    base: Any  # without annotations and without ``None``
    constraints: tuple[Constraint, ...]
    min_length: int  # of a list
    struct: type[Struct] | None  # the struct that it is or may be
    choices: tuple[str, ...]  # of the ``Literal`` that it is or may be


class Entry(NamedTuple):
    """A key with its value."""

    key: str  # as it is written
    name: str  # of the field: the key without ``_file``, ``_env`` or ``_credential`` of a secret
    value: Any
    is_variable: bool


def read_struct(path: Path, struct: type[Section]) -> Section:
    """Return a whole YAML file as a struct; raises ``ConfigError`` with all its mistakes."""
    values, places = read(path)
    reader = Reader(places, path.absolute().parent)
    section: Section = reader.read(values, struct)
    if reader.mistakes:
        raise ConfigError.of(reader.mistakes)
    return section


def _accept(_path: str, _struct: Struct) -> Iterable[str]:
    return ()


class Reader(Struct, frozen=True):
    """Converts values, and collects ``mistakes``."""

    places: Places
    directory: Path  # for relative paths
    environment: Mapping[str, str] | None = None  # without it, secrets and named files are not read
    check_struct: StructCheck = _accept
    mistakes: list[Mistake] = []

    def read(self, value: Any, annotation: Any, path: str = "") -> Any:
        """Return the value converted to its type, or ``WRONG``."""
        expected = value_type(annotation)
        is_optional = NoneType in get_args(annotation)
        if value is None and is_optional and expected.struct is None:
            return None  # but not for a section: an empty one is probably unfinished
        try:
            converted = self._converted(value, expected, path)
            if converted is not WRONG:
                self._check(converted, expected)
        except (ValueError, ConfigError) as error:
            return self._mistake(path, str(error))
        return converted

    def _mistake(self, path: str, text: str) -> Any:
        """Add a mistake at a path; return ``WRONG``.

        ``text`` may begin with the name of a key below the path and ``: ``.
        """
        key, colon, rest = text.partition(": ")
        if colon and KEY_PATH.fullmatch(key):
            path = _below(path, key)
            text = rest
        self.mistakes.append(Mistake(self.places.nearest(path), path, text))
        return WRONG

    def _converted(self, value: Any, expected: ValueType, path: str) -> Any:
        """Convert a value; raises ``ValueError`` if it has another form than its type."""
        base = expected.base
        struct = expected.struct
        if struct is not None and (isinstance(value, dict) or base is struct):
            return self._struct(value, struct, path)
        if get_origin(base) is tuple:
            return self._list(value, expected, path)
        if get_origin(base) is dict:
            return self._mapping(value, expected, path)
        if base is Secret:
            return self._secret(value)
        return _scalar(value, expected)

    def _check(self, value: Any, expected: ValueType) -> None:
        """Raise ``ValueError`` if a value breaks a constraint of its type."""
        is_secret = isinstance(value, Secret)
        for constraint in expected.constraints:
            if self.environment is None:
                if not constraint.reads_files and not is_secret:
                    constraint.check(value)
            elif is_secret:
                constraint.check(value.reveal(self.environment))
            else:
                constraint.check(value)

    # ---- mappings and lists

    def _mapping(self, values: Any, expected: ValueType, path: str) -> dict[Any, Any]:
        """Convert a section whose keys the user chooses."""
        if not isinstance(values, dict):
            raise _unlike(values, SECTION)
        key_type, item_type = get_args(expected.base)
        mapping: dict[Any, Any] = {}
        for key, value in values.items():
            below = _below(path, key)
            if value is None:
                below = _below(path, shown(key))  # the key may be the value
            if value is None and missing_blank(key):
                self._mistake(below, missing_blank(key))
                continue
            converted_key = self.read(key, key_type, below)
            if item_type is Any:
                converted_value = self._plain(value, str(key))
            else:
                converted_value = self.read(value, item_type, below)
            if converted_key is not WRONG and converted_value is not WRONG:
                mapping[converted_key] = converted_value
        return mapping

    def _list(self, value: Any, expected: ValueType, path: str) -> Any:
        """Convert a list. A single text needs no brackets."""
        item_type, *_ = get_args(expected.base)
        items = value
        if isinstance(value, Variable):
            items = [part.strip() for part in value.split(",")]
        elif isinstance(value, str) and value_type(item_type).struct is None:
            items = [value]
        if not isinstance(items, list):
            raise _unlike(items, LIST)
        if len(items) < expected.min_length:
            raise ValueError("expected at least one")

        converted: list[Any] = []
        for index, item in enumerate(items):
            converted.append(self.read(item, item_type, f"{path}[{index}]"))
        if WRONG in converted:
            return WRONG
        return tuple(converted)

    # ---- sections

    def _struct(self, values: Any, struct: type[Struct], path: str) -> Any:
        if not isinstance(values, dict):
            raise _unlike(values, SECTION)
        fields = fields_of(struct)
        has_unknown_keys = False
        converted: dict[str, Any] = {}  # by the names of the keys
        for entry in self._entries(values, fields):
            if entry.name not in fields:
                has_unknown_keys = True
                text = _unknown_key(entry.key, struct, path)
                self._mistake(_below(path, shown(entry.key)), text)
            elif entry.name in converted:
                text = f"{entry.name} is given twice: leave one of the two out"
                converted[entry.name] = self._mistake(_below(path, entry.key), text)
            else:
                below = _below(path, entry.key)
                converted[entry.name] = self.read(entry.value, fields[entry.name].type, below)

        missing = [name for name in fields if fields[name].required and name not in converted]
        if missing and not has_unknown_keys:  # else a required key may be misspelled
            for name in missing:
                converted[name] = self._mistake(path, f"the key `{name}` is missing")

        is_part = path != ""
        if is_part and (has_unknown_keys or WRONG in converted.values()):
            return WRONG
        # the whole configuration is made from its valid values
        valid = {name: value for name, value in converted.items() if value is not WRONG}
        return self._make(struct, {fields[name].name: valid[name] for name in valid}, path)

    def _entries(self, values: dict[str, Any], fields: Mapping[str, Any]) -> list[Entry]:
        """Return the keys with their values, without those that a variable replaces.

        `url_file` in the file is replaced by the variable of `url`.
        """
        entries = [self._entry(key, value, fields) for key, value in values.items()]
        replaced = {entry.name for entry in entries if entry.is_variable}
        return [entry for entry in entries if entry.is_variable or entry.name not in replaced]

    def _entry(self, key: str, value: Any, fields: Mapping[str, Any]) -> Entry:
        """Return a key with its value. The path of a file is made relative to ``directory``."""
        is_variable = isinstance(value, Variable)
        name, _, source = key.rpartition("_")
        is_secret = name in fields and value_type(fields[name].type).base is Secret
        if is_secret and source in SOURCES:
            return Entry(key, name, {source: value}, is_variable)
        if key.endswith("_file") and isinstance(value, str):
            return Entry(key, key, str(self.directory / value), is_variable)
        return Entry(key, key, value, is_variable)

    def _make(self, struct: type[Struct], arguments: dict[str, Any], path: str) -> Any:
        try:
            section = struct(**arguments)
        except ValueError as error:  # from a rule about several keys
            texts = str(error).splitlines()
        else:
            texts = list(self.check_struct(path, section))
            if not texts:
                return section
        for text in texts:
            self._mistake(path, text)
        return WRONG

    def _plain(self, value: Any, key: str = "") -> Any:
        """Return a value whose type is not known here, with absolute paths of files."""
        if isinstance(value, dict):
            return {str(name): self._plain(item, str(name)) for name, item in value.items()}
        if isinstance(value, list):
            return [self._plain(item) for item in value]
        if isinstance(value, str):
            if key == "file" or key.endswith("_file"):
                return str(self.directory / value)
            return str(value)
        return value

    def _secret(self, value: Any) -> Secret:
        reference = value
        if isinstance(value, dict) and isinstance(value.get("file"), str):
            reference = {**value, "file": str(self.directory / value["file"])}
        secret = Secret.read(reference)
        if self.environment is not None:
            secret.reveal(self.environment)  # raises if it cannot be read
        return secret


@cache
def fields_of(struct: type[Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    """Return the fields of a struct by the names of their keys."""
    return {field.encode_name: field for field in msgspec.structs.fields(struct)}


@cache
def value_type(annotation: Any) -> ValueType:
    """Take the annotation of a field apart."""
    alternatives = [annotation]
    if get_origin(annotation) in (Union, UnionType):
        alternatives = [part for part in get_args(annotation) if part is not NoneType]
    base = annotation
    if len(alternatives) == 1:
        base = alternatives[0]
    notes: list[Any] = []
    if get_origin(base) is Annotated:
        base, *notes = get_args(base)

    lengths = [note.min_length or 0 for note in notes if isinstance(note, Meta)]
    struct = None
    choices: tuple[str, ...] = ()
    for part in (base, *alternatives):
        if isinstance(part, type) and issubclass(part, Struct) and struct is None:
            struct = part
        if get_origin(part) is Literal and not choices:
            choices = get_args(part)
    return ValueType(
        base=base,
        constraints=tuple(note for note in notes if isinstance(note, Constraint)),
        min_length=max(lengths, default=0),
        struct=struct,
        choices=choices,
    )


def _scalar(value: Any, expected: ValueType) -> Any:
    """Convert a text; raises ``ValueError`` if it does not have the form of its type."""
    if not isinstance(value, str):
        raise _unlike(value, WORDS.get(expected.base, "text"))
    if expected.choices and value not in expected.choices:
        word = shown(value)
        raise ValueError(f"there is no {word!r} here{one_of(word, expected.choices)}")
    if expected.base is Duration:
        return Duration(value)
    if expected.base not in (int, bool):
        return str(value)
    try:
        return msgspec.convert(str(value), expected.base, strict=False)
    except msgspec.ValidationError:
        raise _unlike(value, WORDS[expected.base]) from None


def _below(path: str, key: object) -> str:
    """Return the path of a key below a path."""
    name = meant(str(key))
    if not path:
        return name
    return f"{path}.{name}"


def _unknown_key(key: str, struct: type[Struct], path: str) -> str:
    """Return the text about an unknown key of a struct, with the key that was probably meant."""
    hint = missing_blank(key)
    if hint:
        return hint

    fields = fields_of(struct)
    section = path.rpartition(".")[2]
    if path == f"sinks.{section}" and section in fields:
        example = f"`sinks: {{NAME: {{{section}: ...}}}}`"
        return f"the kind needs a name of your choice before it: {example}"

    expected = list(fields)
    for name, field in fields.items():
        if value_type(field.type).base is Secret:
            expected += [f"{name}_{source}" for source in SOURCES]
    return f"there is no such key here{one_of(shown(key), expected)}"


def _unlike(value: Any, expected: str) -> ValueError:
    """Return the error for a value of another form.

    A long text may be a secret, so it is not shown.
    """
    if value is None:
        return ValueError(EMPTY_VALUE)
    if isinstance(value, list):
        return ValueError(f"expected {expected}, got a list")
    if not isinstance(value, str):
        return ValueError(f"expected {expected}, got keys with values")
    if expected == SECTION and missing_blank(value):
        return ValueError(missing_blank(value))
    return ValueError(f"expected {expected}, got {_form_of_text(value, expected)}")


def _form_of_text(text: str, expected: str) -> str:
    """Return what a text is, for the error that another form was expected."""
    if expected in WORDS.values():
        if len(text) <= LONGEST_SHOWN:
            return repr(str(text))
        return "text"
    if NUMBER.fullmatch(text):
        return "a number"
    if text in ("true", "false"):
        return "true or false"
    return "text"
