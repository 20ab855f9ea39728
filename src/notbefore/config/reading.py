"""Values of a file, of variables and of words -> structs, by the types of their fields; all mistakes in one pass.

What may be written in several ways is taken here: ``KEY_file``, ``KEY_env`` and ``KEY_credential`` for a secret, one
text for a list of one, and a path relative to the file that names it.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Struct

from notbefore.config.constraints import Constraint
from notbefore.config.secret import SOURCES, Secret
from notbefore.config.yaml_file import Places, Variable, read
from notbefore.core.duration import Duration
from notbefore.core.text import one_of
from notbefore.errors import ConfigError, Mistake

Part = TypeVar("Part")
Made = Callable[[str, Any], Iterable[str]]
WRONG: Final[Any] = object()  # in place of a value that is mistaken
LONGEST_SHOWN: Final = 40  # characters of a mistaken text; what is longer may be a key of somebody's
NEAR: Final = 0.85  # from 0 to 1; from here on an unknown key is a known one, misspelt
SECTION: Final = "keys with values below it, `key: value`"
LIST: Final = "a list, [ONE, TWO] or lines that begin with `- `"
WORDS: Final = {  # what msgspec says -> what is said here
    "Expected ": "",
    " | null": "",
    "Integer value out of range": "a whole number",
    "`int`": "a whole number",
    "`bool`": "true or false",
    "`str`": "text",
    "`object`": SECTION,
}


class Kind(NamedTuple):
    """A type without its annotations and without ``None``."""

    of: Any
    constraints: tuple[Constraint, ...]
    struct: type[Struct] | None  # that it is, or that it may be


def read_struct(path: Path, kind: type[Part]) -> Part:
    """Return a whole YAML file as a struct; raises ``ConfigError`` with all that is wrong with it."""
    values, places = read(path)
    reader = Reader(places, path.absolute().parent)
    made: Part = reader.read(values, kind)
    if reader.mistakes:
        raise ConfigError.of(reader.mistakes)
    return made


class Reader:
    """Makes structs, and collects ``mistakes``.

    ``environment``: where secrets and the files that are named are looked at; without one they are not. ``made``
    returns what else is wrong with a struct, given its path and the struct.
    """

    def __init__(
        self, places: Places, base: Path, environment: Mapping[str, str] | None = None, made: Made | None = None
    ) -> None:
        self.mistakes: list[Mistake] = []
        self._places = places
        self._base = base
        self._environment = environment
        self._made = made

    def mistake(self, path: str, text: str) -> Any:
        """Note what is wrong at a path; ``text`` may begin with the name of a key below it and ``: ``."""
        name, colon, rest = text.partition(": ")
        if colon and re.fullmatch(r"[a-z]\w*(?:\.\w+)*", name, re.ASCII):
            path, text = _below(path, name), rest
        self.mistakes.append(Mistake(self._places.nearest(path), path, text))
        return WRONG

    def read(self, value: Any, annotation: Any, path: str = "") -> Any:
        """Return the value as its type says, or ``WRONG``."""
        kind = kind_of(annotation)
        if value is None and type(None) in get_args(annotation) and kind.struct is None:
            return None  # a section that is empty is probably one that was not written to its end
        found = self._converted(value, kind, annotation, path)
        return found if found is WRONG else self._checked(found, kind, path)

    def _converted(self, value: Any, kind: Kind, annotation: Any, path: str) -> Any:
        if kind.struct is not None and (isinstance(value, dict) or kind.of is kind.struct):
            return self._struct(value, kind.struct, path)
        if kind.of is Secret:
            return self._secret(value, path)
        if get_origin(kind.of) is tuple:
            return self._list(value, get_args(kind.of)[0], annotation, path)
        if get_origin(kind.of) is dict and isinstance(value, dict):
            return self._mapping(value, kind, path)
        try:
            text = str(value) if isinstance(value, Variable) else value
            return msgspec.convert(text, annotation, strict=False, dec_hook=_decode)
        except msgspec.ValidationError as error:
            return self.mistake(path, _mistaken(value, kind, str(error).partition(" - at `")[0]))

    def _checked(self, value: Any, kind: Kind, path: str) -> Any:
        try:
            for one in kind.constraints:
                if self._environment is not None:
                    one.check(value.reveal(self._environment) if isinstance(value, Secret) else value)
                elif not (one.looks or isinstance(value, Secret)):
                    one.check(value)
        except (ValueError, ConfigError) as error:
            return self.mistake(path, str(error))
        return value

    def _mapping(self, values: dict[str, Any], kind: Kind, path: str) -> dict[Any, Any]:
        of_key, of_value = get_args(kind.of)
        found = {
            self._checked(key, kind_of(of_key), _below(path, key)): self.read(one, of_value, _below(path, key))
            for key, one in values.items()
        }
        return {key: one for key, one in found.items() if key is not WRONG and one is not WRONG}

    def _struct(self, values: Any, kind: type[Struct], path: str) -> Any:
        if not isinstance(values, dict):
            return self.mistake(path, _unlike(values, SECTION))
        fields = fields_of(kind)
        found: dict[str, Any] = {}
        for key, value in values.items():
            name, given = self._named(key, value, fields)
            if name not in fields:
                found[key] = self.mistake(_below(path, key), _unknown(key, kind, path))
            elif name in found:
                found[name] = self.mistake(_below(path, key), f"{name} is given twice: leave one of the two out")
            else:
                found[name] = self.read(given, fields[name].type, _below(path, key))
        for name, one in fields.items():
            if one.required and name not in found and found.keys() <= fields.keys():  # else it may be the misspelt one
                found[name] = self.mistake(path, f"the key `{name}` is missing")
        if path and any(one is WRONG for one in found.values()):
            return WRONG
        # the whole configuration is made of what is right
        return self._make(kind, {fields[name].name: one for name, one in found.items() if one is not WRONG}, path)

    def _named(self, key: str, value: Any, fields: Mapping[str, Any]) -> tuple[str, Any]:
        """Return the field that a key is for, and what it is given: a file relative to the configuration."""
        name, _, source = key.rpartition("_")
        if source in SOURCES and name in fields and kind_of(fields[name].type).of is Secret:
            return name, {source: value}
        if key.endswith("_file") and isinstance(value, str):
            return key, str(self._base / value)
        return key, value

    def _make(self, kind: type[Struct], given: dict[str, Any], path: str) -> Any:
        try:
            made = kind(**given)
            texts = list(self._made(path, made)) if self._made is not None else []
        except ValueError as error:  # what its keys say together
            texts = str(error).splitlines()
        for text in texts:
            self.mistake(path, text)
        return WRONG if texts else made

    def _secret(self, value: Any, path: str) -> Any:
        if isinstance(value, dict) and isinstance(value.get("file"), str):
            value = value | {"file": str(self._base / value["file"])}
        try:
            secret = Secret.read(value)
            if self._environment is not None:
                secret.reveal(self._environment)
        except (ValueError, ConfigError) as error:
            return self.mistake(path, str(error))
        return secret

    def _list(self, value: Any, item: Any, annotation: Any, path: str) -> Any:
        """Make a tuple. One text may stand without brackets."""
        if isinstance(value, Variable):
            value = [one.strip() for one in value.split(",")]
        elif isinstance(value, str) and kind_of(item).struct is None:
            value = [value]
        if not isinstance(value, list):
            return self.mistake(path, _unlike(value, LIST))
        if not value and any(getattr(one, "min_length", 0) for one in get_args(annotation)):
            return self.mistake(path, "expected at least one")
        found = tuple(self.read(one, item, f"{path}[{number}]") for number, one in enumerate(value))
        return WRONG if any(one is WRONG for one in found) else found


@cache
def fields_of(kind: type[Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    """Return the fields of a struct by the names of their keys."""
    return {one.encode_name: one for one in msgspec.structs.fields(kind)}


@cache
def kind_of(annotation: Any) -> Kind:
    """Return what an annotation says."""
    constraints: tuple[Constraint, ...] = ()
    while True:
        if get_origin(annotation) is Annotated:
            annotation, *more = get_args(annotation)
            constraints += tuple(one for one in more if isinstance(one, Constraint))
            continue
        parts = [one for one in get_args(annotation) if one is not type(None)] if _is_union(annotation) else []
        if len(parts) != 1:
            break
        annotation = parts[0]
    struct = next((one for one in (annotation, *parts) if isinstance(one, type) and issubclass(one, Struct)), None)
    return Kind(annotation, constraints, struct)


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) is Union or type(annotation).__name__ == "UnionType"


def _below(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _decode(kind: type, value: object) -> object:
    if kind is Duration:
        return Duration(value)
    raise NotImplementedError(kind)  # a new type in a struct, and this function does not know it: a bug


def _unknown(key: str, kind: type[Struct], path: str) -> str:
    """Say what was probably meant by an unknown key of a struct."""
    from difflib import get_close_matches  # noqa: PLC0415 - only for who mistypes

    fields = fields_of(kind)
    own = path.rpartition(".")[2]
    if own in fields:
        return f"a name of yours stands before the kind: `sinks: {{NAME: {{{own}: ...}}}}`"
    inner = [name for name, one in fields.items() if (of := kind_of(one.type).struct) and key in fields_of(of)]
    if len(inner) == 1 and not get_close_matches(key, fields, cutoff=NEAR):
        return f"this key belongs below `{inner[0]}`"
    secrets = [name for name, one in fields.items() if kind_of(one.type).of is Secret]
    known = [*fields, *(f"{name}_{one}" for name in secrets for one in SOURCES)]
    return f"there is no such key here{one_of(key, known)}"


def _mistaken(value: Any, kind: Kind, said: str) -> str:
    """Say what was expected instead of a value that is no list and no section; ``said``: by msgspec."""
    known = [str(one) for one in _choices(kind.of)]
    if known and isinstance(value, str):
        return f"there is no {str(value)!r} here{one_of(value, known)}"
    if said.startswith("expected") and value is not None:  # a type of ours
        return said
    for word, ours in WORDS.items():
        said = said.replace(word, ours)
    return _unlike(value, said.partition(", got ")[0], secret=get_origin(kind.of) is dict)


def _unlike(value: Any, expected: str, *, secret: bool = True) -> str:
    """Say what was expected; a text that may be a ``secret`` is not shown."""
    if value is None:
        return "nothing stands here: write what belongs there, or leave the line out for the default"
    if isinstance(value, dict):
        return f"expected {expected}, got keys with values"
    if isinstance(value, list):
        return f"expected {expected}, got a list"
    hidden = secret or len(value) > LONGEST_SHOWN
    return f"expected {expected}, got {'text' if hidden else repr(str(value))}"


def _choices(kind: Any) -> Iterator[Any]:
    parts = (kind, *get_args(kind)) if _is_union(kind) else (kind,)
    return (one for part in parts if get_origin(part) is Literal for one in get_args(part))
