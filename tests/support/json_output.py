"""Parses the ``--json`` output of commands, and checks it against their schemas."""

import json
from pathlib import Path
from typing import Any, Final

import jsonschema

_SCHEMA: Final = json.loads(
    (Path(__file__).parents[2] / "config" / "commands.schema.json").read_bytes()
)


def parsed_output(command: str, text: str) -> list[Any]:
    """Return the objects that a command printed, one on each line, after a check of each."""
    schema = {**_SCHEMA, "$ref": f"#/commands/{command}"}
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    objects = [json.loads(line) for line in text.splitlines()]
    for value in objects:
        validator.validate(value)
    return objects
