"""``shown(name)`` returns a name from the configuration without what may be a secret in it.

A missing blank, or a value in the wrong place, makes a secret a name. ``meant(name)`` is enough for
a name that is valid.
"""

import re
from typing import Final

_END: Final = re.compile(r"[:=\s]")  # what stands before it is the name that was meant
_LONGEST: Final = 20  # characters; a longer name with a digit may be a key or a token
_VARIABLE: Final = re.compile(r"[A-Z0-9]+(?:_+[A-Z0-9]+)+")  # words of an environment variable
_BEGINNING: Final = 4  # characters shown of it


def meant(name: str) -> str:
    """Return the name up to its first ``:``, ``=`` or blank."""
    return _END.split(name.strip(), maxsplit=1)[0]


def shown(name: str) -> str:
    """Return the name that was meant; only its beginning if it looks like a token."""
    text = meant(name)
    may_be_token = len(text) > _LONGEST and re.search(r"\d", text) is not None
    if may_be_token and not _VARIABLE.fullmatch(text):
        return text[:_BEGINNING] + "…"
    return text


def missing_blank(key: str) -> str:
    """Return the hint that a key is a key and its value; empty if it does not look like that."""
    name, colon, _ = key.partition(":")
    if not colon or name != shown(name):
        return ""
    return f"a blank is missing after `{name}:`"
