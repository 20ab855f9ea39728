"""Markup from values: ``tag`` escapes every text that is not ``Html`` already, so that forgetting it is harmless."""

import html
import re
from typing import Final

_VOID: Final = frozenset({"br", "link", "meta"})
# controls that HTML does not allow, and the marks that turn the direction of text around or hide in it: these are
# shown, not obeyed
_CONTROLS: Final = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
_UNSEEN: Final = re.compile(f"[{_CONTROLS}]")
_SPECIAL: Final = re.compile(f"[&<>\"'{_CONTROLS}]")


class Html(str):
    """Text that is markup."""

    __slots__ = ()


def escape(text: str) -> Html:
    """Text as markup that shows it, between tags and in attributes."""
    if _SPECIAL.search(text) is None:  # nearly always, and a page is a thousand texts
        return Html(text)
    return Html(html.escape(_UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)))


def tag(name: str, /, *children: str, **attributes: str | float | bool | None) -> Html:
    """An element. ``class_`` is ``class``, ``data_until`` is ``data-until``; ``None`` and ``False`` are left out."""
    start = name
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")  # noqa: PLW2901 - as HTML writes it
        start += f" {key}" if value is True else f' {key}="{escape(value) if isinstance(value, str) else value}"'
    if name in _VOID:
        return Html(f"<{start}>")
    return Html(f"<{start}>{joined(*children)}</{name}>")


def joined(*children: str) -> Html:
    """One after the other; what is not ``Html`` is escaped."""
    return Html("".join([child if isinstance(child, Html) else escape(child) for child in children]))
