"""Text from outside made safe to show; lists of names; times as text; digests. Pure."""

import hashlib
import re
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import Final

# what chats take for the beginning of a mention: @channel of Mattermost and Discord, @name, and
# <!channel> of Slack. An address of a mail is none, unless a chat sees @all in it
_MENTION: Final = re.compile(
    r"@(?=all|channel|everyone|here|room)|(?<![\w.%+-])@(?=\S)|<(?=[!@#&a-z])", re.IGNORECASE
)
_UNSEEN: Final = "\u200b"  # a space without width


def escaped(text: str) -> str:
    r"""Return the text on one line.

    Characters that could fake a line or reorder the display become ``\uXXXX``.
    """
    if text.isprintable():
        return text
    letters: list[str] = []
    for letter in text:
        if letter.isprintable():
            letters.append(letter)
        else:
            letters.append(_code_of(letter))
    return "".join(letters)


def _code_of(letter: str) -> str:
    """Return JSON's escape of a character: two surrogates beyond U+FFFF."""
    digits = letter.encode("utf-16-be", "surrogatepass").hex()
    units = [digits[start : start + 4] for start in range(0, len(digits), 4)]
    return "".join(rf"\u{unit}" for unit in units)


def one_line(text: str) -> str:
    """Return the text as one line for people: without line ends, control characters, or marks that
    change direction.
    """
    line = " ".join(text.split())
    return "".join(letter for letter in line if letter.isprintable())


def without_mentions(text: str) -> str:
    """Return the text with an invisible space in each mention, so that a chat notifies no one."""
    return _MENTION.sub(rf"\g<0>{_UNSEEN}", text)


def shortened(text: str, most: int) -> str:
    """Return the beginning of a text, at most ``most`` characters.

    An ellipsis ends a text that was cut.
    """
    if len(text) <= most:
        return text
    return text[: most - 1] + "…"


def some_of(names: Sequence[str], most: int) -> str:
    """Return the first ``most`` of the names: ``web_0, web_1 and 97 more``."""
    listed = ", ".join(names[:most])
    if len(names) <= most:
        return listed
    return f"{listed} and {len(names) - most} more"


def counted(count: int, noun: str) -> str:
    """Return a number of things: ``1 VM``, ``2,000 VMs``."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}s"


def natural(name: str) -> tuple[list[str | int], str]:
    """Return a key to sort names by, with numbers by their value: web_2 before web_10."""
    parts: list[str | int] = []
    for position, part in enumerate(re.split("([0-9]{1,18})", name.casefold())):
        is_number = position % 2 == 1  # ``split`` puts the separators between the other parts
        if is_number:
            parts.append(int(part))
        else:
            parts.append(part)
    return parts, name


def one_of(word: str, names: Collection[str]) -> str:
    """Return the end of a sentence about an unknown word.

    For example ``: did you mean 'Reboot'? Expected one of Reboot``.
    """
    by_folded = {name.casefold(): name for name in names}
    near = get_close_matches(word.casefold(), by_folded, n=1)
    expected = f"one of {', '.join(names)}"
    if not near:
        return f": expected {expected}"
    return f": did you mean {by_folded[near[0]]!r}? Expected {expected}"


def rfc3339(time: datetime) -> str:
    """Return a time in UTC to the millisecond: 2022-04-11T22:26:58.000Z."""
    return time.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def sha256(content: bytes) -> str:
    """Return a digest, 64 hexadecimal digits, that identifies a change, a delivery or an event's
    content.
    """
    return hashlib.sha256(content).hexdigest()
