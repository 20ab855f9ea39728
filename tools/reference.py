"""The references in docs/, made from the code: this writes them (``make reference``), a test compares.

Configuration from the structs, with the comment beside each field; metrics from ``metrics/families.py``; the record
from its JSON Schema.
"""

import ast
import inspect
import io
import os
import re
import sys
import tokenize
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import msgspec
from msgspec import NODEFAULT, Meta, Struct, json

from notbefore.config.model import Config
from notbefore.config.secret import Secret
from notbefore.config.sinks import KINDS, SinkSettings
from notbefore.core.clock import Instant
from notbefore.core.document import parse
from notbefore.core.duration import Duration
from notbefore.core.lifecycle import Observation, Tracked, diff
from notbefore.core.record import Record, Vm
from notbefore.metrics import families
from notbefore.metrics.families import Metric, Snapshot
from notbefore.metrics.outbox import OutboxView
from notbefore.metrics.process import Figures
from notbefore.metrics.totals import Totals
from notbefore.otlp.names import ATTRIBUTES, instrument, prometheus_name

DOCS: Final = Path(__file__).parent.parent / "docs"
RECORD_SCHEMA: Final = DOCS.parent / "src/notbefore/core/record.v1.json"
MAX_LISTED: Final = 20  # label values that are listed one by one
NOW: Final = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
NOTE: Final = "<!-- Made by `make reference`: change the code that it is made from. -->\n"

CONFIGURATION: Final = """# Configuration

{note}
One YAML file, given to `notbefore run`. Every key has a default except a sink's address: an empty file is a working
agent. `notbefore check-config FILE` says what is wrong with one, with file, line and path, or what it amounts to; an
unknown key is wrong. SIGHUP reads it again; one that is wrong is refused, and the old one stays.
[config/notbefore.yml](../config/notbefore.yml) is one to begin with.

Later wins: the defaults, the file, the environment (`NOTBEFORE_IMDS__INTERVAL=5s`: the path in capitals, `__` between
its parts), the command line (`--listen`, `--imds`, `--state-dir`).

**Duration**: `500ms`, `1s`, `1m30s`, `1h`. **Secret**: text, or instead of `url` one of `url_file` (relative to the
configuration), `url_env`, `url_credential` (systemd's `LoadCredential=`); so for each key marked *secret*. None is
ever printed.
"""
METRICS: Final = """# Metrics

{note}
What `/metrics` shows, in the text format and in OpenMetrics. Samples are computed at the scrape. Durations are seconds,
times Unix seconds. Series that are counted begin at 0 for every value that is known beforehand; an unforeseen one is
added, and beyond a bound becomes `other`. What concerns events or deliveries survives a restart; the rest begins anew.
"""
RECORD: Final = """# The record

{note}
Each change in the life of an event is one flat JSON object: a line on standard output, an entry of `/api/v1/history`
(which answers with the newest 4 MiB at most, and says then that it was `cut`), the body of a webhook, the `data` of a
CloudEvent in an Event Hub. The names are OpenTelemetry's, and ours below `azure.scheduled_event.`. What is not known is
left out, never guessed. The JSON Schema is [record.v1.json](../src/notbefore/core/record.v1.json).

Standard output has each record at most once: an agent that is killed between the commit and the write leaves its line
out. The history and the outbox lose nothing.

```json
{example}
```
"""


# ---- configuration


def configuration() -> str:
    """docs/configuration.md."""
    os.environ.pop("STATE_DIRECTORY", None)  # the default of state.dir is to be that of a plain start
    parts = [CONFIGURATION.format(note=NOTE)]
    for field in msgspec.structs.fields(Config):
        if field.encode_name == "sinks":
            parts.append(_sinks())
        elif (inner := _struct_in(field.type)) is not None:
            parts.append(_section(_path("", field.encode_name, field.type), inner))
    return "\n".join(parts)


def _sinks() -> str:
    common = _table("", SinkSettings)
    parts = [
        "## `sinks.NAME`\n\nA name of yours, then one kind with its keys. See [notifications](notifications.md).\n",
        f"Every kind takes:\n\n{common}",
    ]
    for kind, struct in KINDS.items():
        rows = set(common.splitlines()[2:])
        own = [row for row in _table("", struct).splitlines(keepends=True) if row.rstrip() not in rows]
        parts.append(f"### `sinks.NAME.{kind}`\n\n{_text(struct)}\n\n{''.join(own)}")
    return "\n".join(parts)


def _section(path: str, struct: type[Struct]) -> str:
    return f"## `{path}`\n\n{_text(struct)}\n\n{_table('', struct)}"


def _text(struct: type[Struct]) -> str:
    return (inspect.getdoc(struct) or "").replace("``", "`")


def _table(above: str, struct: type[Struct]) -> str:
    head = "| key | type | default | |\n|---|---|---|---|\n" if not above else ""
    return head + "".join(_rows(above, struct))


def _rows(above: str, struct: type[Struct]) -> Iterator[str]:
    """A row for each key, those of structs within it included."""
    comments = _comments(struct)
    secrets = getattr(struct, "SECRETS", ())
    for field in msgspec.structs.fields(struct):
        path = _path(above, field.encode_name, field.type)
        inner = _struct_in(field.type)
        text = comments.get(field.name, "")
        kind = "secret" if field.name in secrets else _type(field.type)
        yield f"| `{path}` | {kind} | {_default(field)} | {_cell(text or (_text(inner) if inner else ''))} |\n"
        if inner is not None:
            yield from _rows(path + ".", inner)


def _path(above: str, name: str, kind: Any) -> str:
    """``match.duration``, ``rules[]``, ``labels.NAME``."""
    kinds = [kind, *get_args(kind)]
    if _struct_in(kind) is not None and any(get_origin(item) is tuple for item in kinds):
        return f"{above}{name}[]"
    if _struct_in(kind) is not None and any(get_origin(item) is dict for item in kinds):
        return f"{above}{name}.NAME"
    return above + name


def _struct_in(kind: Any) -> type[Struct] | None:
    """The struct that a field holds, by itself, in a list, or as a value of a mapping."""
    if isinstance(kind, type) and issubclass(kind, Struct):
        return kind
    return next((found for item in get_args(kind) if (found := _struct_in(item)) is not None), None)


def _type(kind: Any) -> str:
    origin, inner = get_origin(kind), [item for item in get_args(kind) if item is not NoneType]
    if origin is Literal:
        return ", ".join(f"`{item}`" for item in inner)
    if origin in (Union, UnionType, Annotated):
        return " or ".join(_type(item) for item in inner if not isinstance(item, Meta))
    if origin is tuple:
        return f"list of {_type(inner[0])}"
    if origin is dict:
        return f"mapping to {_type(inner[1])}"
    if _struct_in(kind) is not None:
        return "section"
    names = {
        Duration: "duration",
        Secret: "secret",
        str: "text",
        bool: "true or false",
        int: "integer",
        float: "number",
    }
    return names[kind]


def _default(field: Any) -> str:
    if field.required:
        return "*required*"
    value = field.default if field.default is not NODEFAULT else field.default_factory()
    if value is None or value in ((), {}) or isinstance(value, Struct):
        return "" if isinstance(value, Struct) else "none"
    if isinstance(value, tuple):
        return ", ".join(f"`{item}`" for item in value)
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`" if str(value) else "empty"


def _comments(struct: type[Struct]) -> dict[str, str]:
    """What is said of each field: the comment behind it, or the lines above it; those of the bases as well."""
    found: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        if issubclass(base, Struct) and base.__module__.startswith("notbefore"):
            found |= _own_comments(base)
    return found


def _own_comments(struct: type) -> dict[str, str]:
    source = inspect.cleandoc("\n" + inspect.getsource(struct))
    behind, above = _comment_lines(source)
    found: dict[str, str] = {}
    (body,) = (node.body for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            lines: list[str] = []
            number = node.lineno - 1
            while number in above:
                lines.insert(0, above[number])
                number -= 1
            text = next((behind[line] for line in range(node.lineno, (node.end_lineno or 0) + 1) if line in behind), "")
            found[node.target.id] = " ".join(filter(None, (*lines, text)))
    return {name: text for name, text in found.items() if text}


def _comment_lines(source: str) -> tuple[dict[int, str], dict[int, str]]:
    """Line number -> comment: those behind code, and those that stand alone."""
    behind: dict[int, str] = {}
    alone: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = re.sub(r"\s*(noqa|type:|pragma)\b.*", "", token.string.lstrip("# ")).strip()
            (alone if token.line.lstrip().startswith("#") else behind)[token.start[0]] = text
    return behind, alone


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# ---- metrics


def metrics() -> str:
    """docs/metrics.md."""
    found = [value for value in vars(families).values() if isinstance(value, Metric)]
    known = {family.metric.name: list(family.samples) for family in families.samples(_nothing())}
    parts = [METRICS.format(note=NOTE)]
    for title, start in (("Scheduled events", "azure_"), ("The agent itself", "notbefore_")):
        rows = [_metric_row(metric) for metric in found if metric.name.startswith(start)]
        parts.append(f"## {title}\n\n| metric | type | labels | |\n|---|---|---|---|\n{''.join(rows)}")
    parts.append(
        "## Values of labels\n\nThose that are there from the start.\n\n| metric | label | values |\n|---|---|---|"
    )
    return "\n".join((*parts, "".join(_label_rows(found, known))))


def _nothing() -> Snapshot:
    return Snapshot(Tracked(), Totals(), Figures(), NOW, OutboxView(), sinks=("SINK",))


def _metric_row(metric: Metric) -> str:
    name = metric.name + ("_total" if metric.kind == "counter" else "")
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{name}` | {metric.kind} | {labels} | {_cell(metric.help)} |\n"


def _label_rows(found: list[Metric], known: dict[str, list[tuple[str, ...]]]) -> Iterator[str]:
    for metric in found:
        for number, label in enumerate(metric.labels):
            values = list(dict.fromkeys(labels[number] for labels in known.get(metric.name, ()) if labels[number]))
            if values and values != ["SINK"] and len(values) <= MAX_LISTED:
                suffix = "_total" if metric.kind == "counter" else ""
                yield f"| `{metric.name}{suffix}` | `{label}` | {', '.join(f'`{value}`' for value in values)} |\n"


# ---- the record


def record_reference() -> str:
    """docs/record.md."""
    schema = json.decode(RECORD_SCHEMA.read_bytes())
    required = set(schema["required"])
    rows = "".join(_attribute_row(name, given, required) for name, given in schema["properties"].items())
    example = json.format(_example(), indent=2).decode()
    return RECORD.format(note=NOTE, example=example) + f"\n| attribute | type | | |\n|---|---|---|---|\n{rows}"


def _attribute_row(name: str, given: dict[str, Any], required: set[str]) -> str:
    always = "always" if name in required else ""
    return f"| `{name}` | {_json_type(given)} | {always} | {_cell(given.get('description', ''))} |\n"


def _json_type(given: dict[str, Any]) -> str:
    if "const" in given:
        return f"`{given['const']}`"
    if "enum" in given:
        return ", ".join(f"`{value}`" for value in given["enum"])
    if given.get("type") == "array":
        return f"list of {_json_type(given['items'])}"
    if given.get("format") == "date-time":
        return "time (RFC 3339, UTC)"
    return str(given.get("type", ""))


def _example() -> bytes:
    """An event that is announced: what the agent itself makes of it."""
    event = {
        "EventId": "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
        "EventStatus": "Scheduled",
        "EventType": "Freeze",
        "ResourceType": "VirtualMachine",
        "Resources": ["WestNO_0", "WestNO_1"],
        "NotBefore": "Sun, 01 Mar 2026 12:14:58 GMT",
        "Description": "Virtual machine is being paused because of a memory-preserving Live Migration operation.",
        "EventSource": "Platform",
        "DurationInSeconds": 5,
    }
    document = parse(json.encode({"DocumentIncarnation": 2, "Events": [event]}))
    (change,) = diff(Tracked(), document, Observation(Instant(NOW, date=NOW), "WestNO_0")).changes
    return Record.of(change, Vm(name="WestNO_0", location="westeurope", zone="1")).line()


def opentelemetry() -> str:
    """The page as it is, with the tables of names, and the statements that rename attributes, made anew."""
    page = (DOCS / "opentelemetry.md").read_text(encoding="utf-8")
    rows = ["| Prometheus | OpenTelemetry | kind | unit |", "|---|---|---|---|"]
    for metric in families.METRICS:
        found = instrument(metric)
        unit = f"`{found.unit}`" if found.unit else ""
        rows.append(f"| `{prometheus_name(metric)}` | `{found.name}` | {found.kind} | {unit} |")
    page = _with_table(page, rows)
    rows = ["| label at `/metrics` | attribute |", "|---|---|"]
    page = _with_table(page, rows + [f"| `{label}` | `{name}` |" for label, name in ATTRIBUTES.items()])
    patterns = {label: name.replace(".", r"\\.") for label, name in ATTRIBUTES.items()}
    lines = [f'replace_all_patterns(attributes, "key", "^{name}$$", "{label}")' for label, name in patterns.items()]
    statements = "".join(f"          - {line}\n" for line in lines)
    return re.sub(r"(?m)(^ +- replace_all_patterns.*\n)+", lambda _: statements, page)


def _with_table(page: str, rows: list[str]) -> str:
    """The page with these rows instead of the table that has the same first row."""
    table = "".join(f"{row}\n" for row in rows)
    page, count = re.subn(rf"(?m)^{re.escape(rows[0])}\n(\|.*\n)*", lambda _: table, page)
    if count != 1:
        raise SystemExit(f"docs/opentelemetry.md: expected one table that begins with {rows[0]}")
    return page


PAGES: Final[dict[str, Callable[[], str]]] = {
    "configuration.md": configuration,
    "metrics.md": metrics,
    "opentelemetry.md": opentelemetry,
    "record.md": record_reference,
}


def main() -> None:
    """Write them all."""
    for name, make in PAGES.items():
        (DOCS / name).write_text(make(), encoding="utf-8")
        sys.stdout.write(f"docs/{name}\n")


if __name__ == "__main__":
    main()
