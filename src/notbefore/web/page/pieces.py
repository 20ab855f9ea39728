"""What the sections of the page are made of."""

from datetime import UTC, datetime
from typing import Final

from notbefore.core.duration import span
from notbefore.web.page.html import Html, tag

WHOM: Final = {"self": "this VM", "peer": "another VM", "unknown": "perhaps this VM"}


def section(identity: str, title: str, *content: str) -> Html:
    """A part of the page with its heading."""
    heading = tag("h2", title, id=f"{identity}-title")
    return tag("section", heading, *content, id=identity, aria_labelledby=f"{identity}-title")


def table(caption: str, heads: tuple[str, ...], rows: list[Html], kind: str | None = None) -> Html:
    """A table of what ``row`` makes.

    The roles are said, since on a phone the cells are laid out as blocks, which takes a table's meaning away.
    """
    head = tag("tr", *(tag("th", text, scope="col", role="columnheader") for text in heads), role="row")
    return tag(
        "table",
        tag("caption", caption),
        tag("thead", head, role="rowgroup"),
        tag("tbody", *rows, role="rowgroup"),
        role="table",
        class_=kind,
    )


def row(key: str, heads: tuple[str, ...], cells: tuple[str, ...], kind: str | None = None) -> Html:
    """A row, whose first cell is its heading; ``key`` tells it from the others."""
    first, *others = cells
    parts = [tag("th", first, scope="row", role="rowheader")]
    parts += [tag("td", cell, role="cell", data_head=head) for head, cell in zip(heads[1:], others, strict=True)]
    return tag("tr", *parts, role="row", data_key=key, class_=kind)


def moment(time: datetime) -> Html:
    """A time, in UTC."""
    utc = time.astimezone(UTC)
    return tag("time", f"{utc:%Y-%m-%d %H:%M:%S}", datetime=f"{utc:%Y-%m-%dT%H:%M:%SZ}")


def clock(time: datetime, now: datetime) -> str:
    """A time in words, in UTC: without the day where that is today."""
    utc = time.astimezone(UTC)
    return f"{utc:%H:%M:%S}" if utc.date() == now.astimezone(UTC).date() else f"{utc:%Y-%m-%d %H:%M:%S}"


def notice(seconds: float | None) -> str:
    """The notice that an event gave."""
    return "not seen" if seconds is None else "none" if seconds == 0 else span(seconds)
