"""Markup from values: ``tag`` escapes every text that is not ``Html`` already, so that forgetting it is harmless."""

import html
import re
from typing import Final

_VOID: Final = frozenset({"br", "link", "meta"})
# controls that HTML does not allow, and the marks that turn the direction of text around or hide in it: shown, not obeyed
_UNSEEN: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]"
)


class Html(str):
    """Text that is markup."""

    __slots__ = ()


def escape(text: str) -> Html:
    """Text as markup that shows it, between tags and in attributes."""
    if not text.isprintable():
        text = _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    return Html(html.escape(text))


def tag(name: str, /, *children: str, **attributes: str | float | bool | None) -> Html:
    """An element. ``class_`` is ``class``, ``data_until`` is ``data-until``; ``None`` and ``False`` are left out."""
    start = name
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")  # noqa: PLW2901 - as HTML writes it
        start += f" {key}" if value is True else f' {key}="{escape(str(value))}"'
    if name in _VOID:
        return Html(f"<{start}>")
    return Html(f"<{start}>{joined(*children)}</{name}>")


def joined(*children: str) -> Html:
    """One after the other; what is not ``Html`` is escaped."""
    return Html("".join([child if isinstance(child, Html) else escape(child) for child in children]))
