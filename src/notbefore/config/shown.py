"""``shown(name)`` hides a possible secret in a name from the configuration.

A missing blank makes a key of a secret: `{url:https://...}`. So does a value in the wrong place.
``meant(name)`` suffices for a valid name.
"""

import re
from typing import Final

_END: Final = re.compile(r"[:=\s]")  # of the name that was meant
_LONGEST: Final = 20  # characters; a longer name with a digit may be a key or a token
VARIABLE_NAME: Final = re.compile(r"[A-Z0-9]+(?:_+[A-Z0-9]+)+")  # an environment variable
_BEGINNING: Final = 4  # characters shown of a possible token


def meant(name: str) -> str:
    """Return the name up to its first ``:``, ``=`` or blank."""
    return _END.split(name.strip(), maxsplit=1)[0]


def shown(name: str) -> str:
    """Return the name that was meant, or its beginning if it looks like a token."""
    text = meant(name)
    may_be_token = len(text) > _LONGEST and re.search(r"\d", text) is not None
    if may_be_token and not VARIABLE_NAME.fullmatch(text):
        return text[:_BEGINNING] + "…"
    return text


def missing_blank(text: str) -> str:
    """Return a hint if a text is a key with its value, as in `url:https`; else an empty text."""
    name, colon, value = text.partition(":")
    is_address = value.startswith("//")
    if not colon or is_address or name != shown(name):
        return ""
    return f"a blank is missing after `{name}:`"
