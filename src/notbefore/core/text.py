"""Text from outside, made safe to show. Pure."""

import re
from typing import Final

# control characters, line and paragraph separators, and the marks that change the direction of text
_UNSAFE: Final = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]")


def escaped(text: str) -> str:
    r"""Return the text as one line that cannot forge another, nor rearrange what is shown: ``\uXXXX`` for the rest."""
    if text.isprintable():
        return text
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def one_line(text: str) -> str:
    """Return the text as one line for people: without line ends, control characters, or marks that change direction."""
    return "".join(letter for letter in " ".join(text.split()) if letter.isprintable())
