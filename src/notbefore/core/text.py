"""Text from outside made safe to show; times as text; digests.

Suggestions for unknown words. Pure.
"""

import re
from collections.abc import Collection, Sequence
from datetime import UTC, datetime


def escaped(text: str) -> str:
    r"""Return the text on one line.

    Characters that could fake a line or reorder the display become ``\uXXXX``.
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else _code_of(letter) for letter in text)


def _code_of(letter: str) -> str:
    """JSON's escape of a character: two surrogates beyond U+FFFF."""
    units = letter.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[start : start + 4]}" for start in range(0, len(units), 4))


def one_line(text: str) -> str:
    """Return the text as one line for people: without line ends, control characters, or marks that
    change direction.
    """
    return "".join(letter for letter in " ".join(text.split()) if letter.isprintable())


def shortened(text: str, most: int) -> str:
    """The beginning of a text, at most ``most`` characters.

    An ellipsis ends a text that was cut.
    """
    return text if len(text) <= most else text[: most - 1] + "…"


def some_of(names: Sequence[str], most: int) -> str:
    """The first ``most`` of the names: ``web_0, web_1 and 97 more``."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def natural(name: str) -> tuple[list[str | int], str]:
    """A key to sort names by, with numbers by their value: web_2 before web_10."""
    parts = re.split("([0-9]{1,18})", name.casefold())  # every second one is a number
    return [int(part) if place % 2 else part for place, part in enumerate(parts)], name


def one_of(word: str, known: Collection[str]) -> str:
    """Return the end of a sentence about an unknown word: ``: did you mean 'Reboot'? Expected one
    of Reboot``.
    """
    from difflib import get_close_matches  # noqa: PLC0415 - only after a typing error

    folded = {one.casefold(): one for one in known}
    near = get_close_matches(word.casefold(), folded, n=1)
    return (
        f": did you mean {folded[near[0]]!r}? Expected" if near else ": expected"
    ) + f" one of {', '.join(known)}"


def rfc3339(time: datetime) -> str:
    """UTC to the millisecond: 2022-04-11T22:26:58.000Z."""
    return time.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def sha256(content: bytes) -> str:
    """A digest that identifies a change, a delivery or an event's content: 64 hexadecimal
    digits.
    """
    import hashlib  # noqa: PLC0415 - it loads OpenSSL, 3.5 MB: an agent that has seen no event does not need it

    return hashlib.sha256(content).hexdigest()
