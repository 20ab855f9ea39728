"""What may be written in several ways -> the one form that the structs take. Pure.

It follows the types of the keys: what holds a ``Secret`` may also be given as KEY_file, KEY_env or KEY_credential.
"""

from pathlib import Path
from typing import Any, Final, get_args, get_origin

import msgspec

from notbefore.config.secret import SOURCES, Secret
from notbefore.config.sinks import SinkConfig
from notbefore.core.routing import EventMatch

NAMES: Final = ("allowed_hosts", "tags")  # lists that an environment variable has as one text, with commas


def prepared(value: Any, kind: Any, base: Path) -> Any:
    """Return a value of the type ``kind`` with secrets as mappings, matchers as lists, and paths below ``base``.

    What has another form than the type says stays as it is: ``to_struct`` says what is wrong with it.
    """
    part = _part(kind)
    if isinstance(value, list):
        return [prepared(one, part, base) for one in value]
    if part is None or not isinstance(value, dict):
        return value
    if get_origin(kind) is dict:
        return {name: prepared(one, part, base) for name, one in value.items()}
    if part is Secret:
        return value | {"file": str(base / value["file"])} if isinstance(value.get("file"), str) else value
    return _prepared_keys(value, part, base)


def _prepared_keys(values: dict[str, Any], struct: Any, base: Path) -> dict[str, Any]:
    types = {field.encode_name: field.type for field in msgspec.structs.fields(struct)}
    found: dict[str, Any] = {}
    for key, value in values.items():
        name, _, source = str(key).rpartition("_")
        kind = types.get(key)
        if source in SOURCES and name in types and _part(types[name]) is Secret:
            found[name] = prepared({source: value}, types[name], base)
        elif str(key).endswith("_file") and isinstance(value, str):
            found[key] = str(base / value)
        elif issubclass(struct, EventMatch) or key == "remind_before":
            found[key] = _listed(value, kind)
        elif key in NAMES and isinstance(value, str):
            found[key] = [name.strip() for name in value.split(",")]
        elif struct is SinkConfig and value is None:  # `windows_event_log:` has nothing below it
            found[key] = {}
        else:
            found[key] = prepared(value, kind, base)
    return found


def _part(kind: Any) -> Any:
    """Return the struct or ``Secret`` that a value of this type is, or is made of; ``None`` if there is none."""
    if kind is Secret or hasattr(kind, "__struct_fields__"):
        return kind
    return next((found for one in get_args(kind) if (found := _part(one)) is not None), None)


def _listed(value: Any, kind: Any) -> Any:
    """Make a list where ``kind`` is one: a text may stand without brackets, and a number (`zone: 1`) without quotes."""
    if get_origin(kind) is dict:
        return (
            {name: _listed(one, get_args(kind)[1]) for name, one in value.items()} if isinstance(value, dict) else value
        )
    if tuple not in (get_origin(kind), *map(get_origin, get_args(kind))):
        return value
    values = value if isinstance(value, list) else [value]
    return [str(one) if isinstance(one, int) and not isinstance(one, bool) else one for one in values]
