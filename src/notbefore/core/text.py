"""Text from outside, made safe to show; the nearest of some words. Pure."""

import re
from collections.abc import Collection
from typing import Final

# control characters, line and paragraph separators, and the marks that change the direction of text
_UNSAFE: Final = re.compile("[\x00-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]")


def escaped(text: str) -> str:
    r"""Return the text as one line that cannot forge another, nor rearrange what is shown: ``\uXXXX`` for the rest."""
    if text.isprintable():
        return text
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def one_line(text: str) -> str:
    """Return the text as one line for people: without line ends, control characters, or marks that change direction."""
    return "".join(letter for letter in " ".join(text.split()) if letter.isprintable())


def one_of(word: str, known: Collection[str]) -> str:
    """Return the end of a sentence about an unknown word: ``: did you mean 'Reboot'? Expected one of Reboot``."""
    from difflib import get_close_matches  # noqa: PLC0415 - only for who mistypes

    folded = {one.casefold(): one for one in known}
    near = get_close_matches(word.casefold(), folded, n=1)
    return (f": did you mean {folded[near[0]]!r}? Expected" if near else ": expected") + f" one of {', '.join(known)}"
