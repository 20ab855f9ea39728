"""Check the ``--json`` output of commands against their schemas."""

import json
from pathlib import Path
from typing import Any, Final

import jsonschema

_SCHEMA: Final = json.loads(
    (Path(__file__).parents[2] / "config" / "commands.schema.json").read_bytes()
)


def parsed_output(command: str, text: str) -> list[Any]:
    """The objects that a command has printed, one on each line, as its schema has them."""
    schema = {**_SCHEMA, "$ref": f"#/commands/{command}"}
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    printed = [json.loads(line) for line in text.splitlines()]
    for value in printed:
        validator.validate(value)
    return printed
