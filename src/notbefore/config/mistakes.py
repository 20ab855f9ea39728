"""What msgspec or YAML refuses, as a sentence for the user: what stands there, what was expected, the nearest name.

Imported only where there is a mistake. Pure.
"""

import re
from collections.abc import Iterator
from datetime import date
from typing import Any, Final, Literal, get_args, get_origin

import msgspec

from notbefore.config.secret import SOURCES, Secret
from notbefore.core.text import one_of

_EXPECTED: Final = re.compile(r"Expected `([^`]+)`, got `([^`]+)`")
_KINDS: Final = {  # msgspec's names of types, in words
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list: [ONE, TWO]",
    "object": "keys with values below it",
}
_YAML: Final = (  # a part of what libyaml or PyYAML says, and what to do about it
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
    (
        ("cannot start any token", "did not find expected alphabetic", "undefined alias"),
        "a value that begins with one of @ ` % * & ! | > needs quotes",
    ),
)
_TAB: Final = "lines are indented with spaces: replace the tab"
_MONTHS_AND_DAYS: Final = "a date that does not exist: put quotes around what is to be text"


def yaml_sentence(error: Exception, text: str) -> tuple[int, str]:
    """Return the line (0: not known) and a sentence for an error of PyYAML in ``text``."""
    mark, said = getattr(error, "problem_mark", None), " ".join(str(getattr(error, "problem", None) or error).split())
    if mark is None:
        return 0, f"this is not YAML: {said}: {_MONTHS_AND_DAYS}"
    line = text.splitlines()[mark.line] if mark.line < len(text.splitlines()) else ""
    if "cannot start any token" in said and line[mark.column : mark.column + 1] == "\t":
        return mark.line + 1, f"this is not YAML: {_TAB}"
    about = f"{getattr(error, 'context', None) or ''} {said}"
    advice = next((advice for parts, advice in _YAML if any(part in about for part in parts)), "")
    return mark.line + 1, f"this is not YAML: {said.removeprefix('but ')}" + (f": {advice}" if advice else "")


def sentence(message: str, value: Any, below: str, root: type) -> str:
    """Return a sentence for msgspec's ``message`` about ``value``, which stands at ``below`` in a ``root``."""
    if unknown := re.search(r"unknown field `(.+)`", message):
        return _unknown_key(unknown[1], list(_types_at(below, root)))
    if value is None and message.startswith("Expected"):
        where = "below" if "object" in message or "array" in message else "after"
        return f"nothing stands {where} it: write what belongs there, or leave the line out for the default"
    if isinstance(value, date):
        return f"YAML reads {value} as a date: put it in quotes, '{value}'"
    if message.startswith("Invalid enum value"):
        known = [str(one) for part in _types_at(below, root) if get_origin(part) is Literal for one in get_args(part)]
        word = message.removeprefix("Invalid enum value ").strip("'")
        return f"there is no {word!r} here{one_of(word, known)}"
    if (expected := _EXPECTED.match(message)) is None:
        return re.sub(r"Object missing required field (`.+`)", r"the key \1 is missing", message)
    kinds = [_KINDS.get(kind, kind) for kind in expected[1].split(" | ") if kind != "null"]
    return f"expected {' or '.join(kinds)}, {_found(value, expected[1])}"


def _found(value: Any, expected: str) -> str:
    if isinstance(value, bool) and "str" in expected:
        return f"and YAML reads this as {str(value).lower()}: put it in quotes"
    if isinstance(value, (int, float)) and "str" in expected:
        return f"got the number {value}: put it in quotes"
    if isinstance(value, dict):
        return "got keys with values" + (": begin each entry with `- `" if "array" in expected else "")
    if isinstance(value, list):
        return "got a list"
    if isinstance(value, str) and expected not in ("bool", "int", "float"):  # it may be a secret
        return "got text: " + ("put it in brackets" if "array" in expected else "write `key: value`")
    return f"got {value!r}"


def _unknown_key(key: str, kinds: list[Any]) -> str:
    """``kinds``: the types that the section around the key may have."""
    fields = {field.encode_name: field for kind in kinds if _is_struct(kind) for field in msgspec.structs.fields(kind)}
    inner = [
        name
        for name, field in fields.items()
        if any(key in (one.encode_name for one in msgspec.structs.fields(part)) for part in _structs(field.type))
    ]
    if len(inner) == 1:
        return f"this key belongs below `{inner[0]}`"
    known = [
        word
        for name, field in fields.items()
        for word in (name, *(f"{name}_{source}" for source in SOURCES if Secret in _parts(field.type)))
    ]
    return f"there is no such key here{one_of(key, known)}"


def _types_at(dotted: str, root: Any) -> Iterator[Any]:
    """Yield the types that a value at this path may have, and those that they are made of."""
    kinds: list[Any] = [root]
    for name in filter(None, re.sub(r"\[[^\]]*\]", "", dotted).split(".")):
        found = [part for kind in kinds for part in _parts(kind)]
        kinds = [
            field.type
            for part in found
            if _is_struct(part)
            for field in msgspec.structs.fields(part)
            if field.encode_name == name
        ] or [get_args(part)[1] for part in found if get_origin(part) is dict]
    for kind in kinds:
        yield from _parts(kind)


def _structs(kind: Any) -> list[Any]:
    """Return the structs that a value of this type, itself and not as an item of a list or mapping, may be."""
    if _is_struct(kind):
        return [kind]
    return [] if get_origin(kind) in (dict, tuple) else [one for part in get_args(kind) for one in _structs(part)]


def _is_struct(kind: Any) -> bool:
    return hasattr(kind, "__struct_fields__")


def _parts(kind: Any) -> Iterator[Any]:
    """Return a type, and the types that it is made of: of ``tuple[A, ...] | None`` also A."""
    yield kind
    for part in get_args(kind):
        yield from _parts(part)
