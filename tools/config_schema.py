"""The configuration as a JSON Schema, from its structs and the comments of their fields.

``docs/configuration.md`` and the schemas for editors and for the Helm chart are made from it.
"""

import inspect
import re
from functools import cache
from typing import Any, Final

import msgspec.inspect as mi
from msgspec import NODEFAULT, Struct, to_builtins

from notbefore.config.secret import SOURCES, Secret
from notbefore.core.duration import Duration

TEXT: Final = {"title": "text", "type": ["string", "integer"]}  # `zone: 1` needs no quotes
# the value of a key such as `url_file`
REFERENCE: Final = {"type": "string", "minLength": 1}
SECRET: Final[dict[str, Any]] = {
    "title": "secret",
    "anyOf": [
        REFERENCE,
        {"type": "object", "maxProperties": 1, "properties": dict.fromkeys(SOURCES, REFERENCE)},
    ],
}
DURATION: Final = {
    "title": "duration",
    "type": "string",
    "pattern": r"^(\d{1,9}(\.\d{1,9})?(ms|s|m|h|d))+$",
}
PLAIN: Final[dict[type, dict[str, Any]]] = {
    mi.StrType: TEXT,
    mi.BoolType: {"title": "true or false", "type": "boolean"},
    mi.AnyType: {"title": "anything"},
    mi.NoneType: {"title": "", "type": "null"},
    Duration: DURATION,
    Secret: SECRET,
}
FIELD: Final = re.compile(r"    (\w+)(: |\Z)")  # the first line of a field in a struct
# the first line of another statement; a bracket would be the last line of a field
OTHER_STATEMENT: Final = re.compile(r"    [^ )\]}]")
# the part of a comment that is for linters
FOR_TOOLS: Final = re.compile(r"\s*(noqa|type:|pragma)\b.*")


def schema_of(struct: type[Struct]) -> dict[str, Any]:
    """Return the schema of a section of the configuration."""
    return _schema(mi.type_info(struct))


def without_plain_secrets(part: Any) -> Any:
    """Return the same schema without secrets in plain text.

    For the chart: Helm puts the values into a ConfigMap.
    """
    if isinstance(part, list):
        return [without_plain_secrets(item) for item in part]
    if not isinstance(part, dict):
        return part
    if part.get("title") == "secret":
        _, sources = SECRET["anyOf"]
        reference = {**sources, "minProperties": 1, "additionalProperties": False}
        return {**part, "anyOf": [reference]}
    return {key: without_plain_secrets(value) for key, value in part.items()}


def _schema(kind: mi.Type) -> dict[str, Any]:
    """Return the schema of a type; ``title`` is its name in docs/configuration.md."""
    match kind:
        case mi.StructType():
            return _section(kind)
        case mi.LiteralType(values=values):
            return {"title": ", ".join(map(str, values)), "enum": [*values]}
        case mi.IntType():
            return _number("integer", kind)
        case mi.FloatType():
            return _number("number", kind)
        case mi.UnionType(types=types):
            alternatives = [_schema(alternative) for alternative in types]
            titles = [alternative["title"] for alternative in alternatives]
            return {"title": " or ".join(filter(None, titles)), "anyOf": alternatives}
        case mi.DictType(value_type=value_type):
            value = _schema(value_type)
            title = f"mapping to {value['title']}"
            return {"title": title, "type": "object", "additionalProperties": value}
        case mi.VarTupleType():
            return _list(kind)
        case mi.CustomType():
            return PLAIN[kind.cls]
        case _:
            return PLAIN[type(kind)]


def _number(name: str, kind: mi.IntType | mi.FloatType) -> dict[str, Any]:
    number: dict[str, Any] = {"title": name, "type": name}
    if kind.ge is not None:
        number["minimum"] = kind.ge
    if kind.le is not None:
        number["maximum"] = kind.le
    return number


def _list(kind: mi.VarTupleType) -> dict[str, Any]:
    item = _schema(kind.item_type)
    title = f"list of {item['title']}"
    several = {"type": "array", "items": item, "minItems": kind.min_length or 0}
    if "properties" in item:
        return {**several, "title": title}
    return {"anyOf": [several, item], "title": title}  # a single text needs no brackets


def _section(kind: mi.StructType) -> dict[str, Any]:
    comments = comments_of(kind.cls)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for field in kind.fields:
        name = field.encode_name
        key = dict(_schema(field.type))
        if field.name in comments:
            key["description"] = comments[field.name]
        default = _default(field)
        if not field.required and not isinstance(default, Struct):
            key["default"] = to_builtins(default, enc_hook=_plain)
        properties[name] = key
        if key["title"] == "secret":
            properties |= {f"{name}_{source}": REFERENCE for source in SOURCES}
        elif field.required:
            required.append(name)
    return {
        "title": "section",
        "description": (inspect.getdoc(kind.cls) or "").replace("``", "`"),
        "type": "object",
        "additionalProperties": False,
        "required": required,
        "properties": properties,
    }


def _plain(default: object) -> Any:
    """Return a default as a user writes it. A secret has a default only if that is a file."""
    if isinstance(default, Secret):
        return default.sealed()
    return str(default)


def _default(field: mi.Field) -> Any:
    if field.default is not NODEFAULT:
        return field.default
    if callable(field.default_factory):
        return field.default_factory()
    return field.default_factory


@cache  # finding the source of a class takes 20 ms, and many classes have the same base
def comments_of(struct: type) -> dict[str, str]:
    """Return the comment of each field, also of the base classes.

    A comment stands on the lines of the field, or on lines of its own above it.
    """
    if not struct.__module__.startswith("notbefore"):
        return {}
    comments: dict[str, str] = {}
    for base in struct.__bases__:
        comments |= comments_of(base)

    new_comments: dict[str, str] = {}
    field = ""
    above = ""
    for line in inspect.getsource(struct).splitlines()[1:]:
        match = FIELD.match(line)
        if match is not None:
            field = match[1]
            new_comments[field] = above
            above = ""
        elif OTHER_STATEMENT.match(line):
            field = ""
        _, mark, text = line.partition("# ")
        text = FOR_TOOLS.sub("", text).strip()
        if line.startswith("    # "):
            above = f"{above} {text}".strip()
        elif mark and field:
            new_comments[field] = f"{new_comments[field]} {text}".strip()
    comments |= {name: text for name, text in new_comments.items() if text}
    return comments
