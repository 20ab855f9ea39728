"""The HTML part of a mail: its title, its text, and a table of facts.

Outlook shows mails with Word, so the layout is a table, and each element has its own style. Text
and background have no colors, so that each mail program uses its own light or dark ones. There are
no pictures.
"""

from collections.abc import Iterable
from html import escape
from string import Template
from typing import Final

from notbefore.wording.texts import Fact, Text

# of each cell: in a table, Outlook does not use the font of what surrounds it
_FONT: Final = "font-family: 'Segoe UI', Arial, sans-serif; font-size: 15px; line-height: 1.4;"
_PAGE: Final = Template(f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="supported-color-schemes" content="light dark">
<title>$title</title>
</head>
<body style="margin: 0; padding: 12px;">
<table role="presentation" width="640" cellspacing="0" cellpadding="0" border="0"\
 style="width: 100%; max-width: 640px;">
<tr>
<td width="6" bgcolor="$color" style="width: 6px; background-color: $color;"></td>
<td style="{_FONT} padding: 2px 0 2px 14px;">
<h1 style="margin: 0; font-size: 20px; line-height: 1.3;">$title</h1>
$paragraphs
<table cellspacing="0" cellpadding="0" border="0" style="width: 100%; margin-top: 14px;">
$facts
</table>
$footer
</td>
</tr>
</table>
</body>
</html>
""")
_PARAGRAPH: Final = Template('<p style="margin: 10px 0 0;">$content</p>')
_CELL: Final = f"{_FONT} padding: 4px 0; border-top: 1px solid #8a8a8a; vertical-align: top;"
_FACT: Final = Template(f"""<tr>
<th scope="row" align="left" width="150" style="{_CELL} width: 150px; padding-right: 14px;">\
$name</th>
<td align="left" style="{_CELL} word-break: break-word;">$value</td>
</tr>""")
_DELIVERY: Final = Template('<p style="margin: 14px 0 0; font-size: 12px;">Delivery: $id</p>')
_LINK: Final = Template('<a href="$address">$name</a>')


def html_of(text: Text, color: str) -> str:
    """Return a message as HTML, with the same content as the plain text.

    ``color``: of the bar next to the message, ``#rrggbb``.
    """
    paragraphs: list[str] = []
    if text.summary:
        paragraphs.append(_paragraph(_lines(text.summary)))
    if text.advice:
        paragraphs.append(_paragraph(f"<strong>What to do:</strong> {_lines(text.advice)}"))

    return _PAGE.substitute(
        title=escape(text.title),
        color=color,
        paragraphs="\n".join(paragraphs),
        facts="\n".join(_fact(fact) for fact in text.facts),
        footer=_footer(text),
    )


def _footer(text: Text) -> str:
    """Return the links and the id; a template's own body has them if it wants them."""
    if text.has_own_body:
        return ""
    return f"{_links(text.links)}\n{_DELIVERY.substitute(id=escape(text.delivery_id))}"


def _paragraph(content: str) -> str:
    return _PARAGRAPH.substitute(content=content)


def _lines(text: str) -> str:
    """Return a text with its line ends."""
    return "<br>".join(escape(line) for line in text.split("\n"))


def _fact(fact: Fact) -> str:
    return _FACT.substitute(name=escape(fact.name), value=escape(fact.value))


def _links(links: Iterable[Fact]) -> str:
    anchors: list[str] = []
    for link in links:
        anchors.append(_LINK.substitute(address=escape(link.value), name=escape(link.name)))
    if not anchors:
        return ""
    return _paragraph(" &middot; ".join(anchors))
