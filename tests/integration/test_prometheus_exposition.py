"""What Prometheus itself says of /metrics."""

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from notbefore.core.lifecycle import diff
from notbefore.core.tracked import Tracked
from notbefore.metrics.families import POLL_DURATION, Family, Part, Snapshot, parts
from notbefore.metrics.totals import Figures, Histogram, PollFigures, Totals
from notbefore.web.exposition import MetricsText, client_metric
from support.azure import PEER, STARTED, Story, at, document, item, now
from support.needs import needs

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


@pytest.fixture(scope="module")
def exposition() -> MetricsText:
    story = Story().sees(0).sees(1, item("a"), item("b", EventType='We"ird\\\n'))
    story.sees(2, item("a", **STARTED), item("b"), item("c", Resources=[PEER], Description="x\ny"))
    story.sees(3, item("d", DurationInSeconds=-1))
    figures, polling = Figures("1.0", "3.11", vm={"name": "a"}), PollFigures(last_success=1.5, flaws={"duration": 1})
    view = Snapshot(story.tracked, story.totals, figures, at(5), polling=polling)
    return MetricsText(lambda: parts(view))


def test_promtool_has_nothing_to_say(exposition: MetricsText) -> None:
    needs("promtool")
    body, _ = exposition.render("text/plain")
    checked = subprocess.run(["promtool", "check", "metrics"], input=body, capture_output=True, check=False, timeout=60)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_openmetrics_is_served_to_those_who_ask_and_parses(exposition: MetricsText) -> None:
    body, content_type = exposition.render(OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")
    parse: Any = text_string_to_metric_families  # has no types
    families = {family.name: family for family in parse(body.decode())}
    assert families["azure_scheduled_event_changes"].type == "counter"
    assert families["azure_scheduled_event_initial_notice_seconds"].type == "histogram"
    assert "process_resident_memory_bytes" in families


def test_what_prometheus_asks_for_first_is_rendered_without_the_http_server_of_the_library() -> None:
    first = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.3"
    look = f"""import sys; from notbefore.web.exposition import MetricsText
print(MetricsText(lambda: []).render("{first}")[1], *sorted({{"ssl", "http.server", "email"}} & sys.modules.keys()))"""
    found = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert found.stdout == "application/openmetrics-text; version=1.0.0; charset=utf-8\n"


@pytest.mark.parametrize(
    ("accept", "openmetrics"),
    [
        ("", False),
        ("*/*", False),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=1.0.0;q=0.4", True),
        ("application/openmetrics-text;version=0.0.1,text/plain;version=0.0.4", False),
        ("application/openmetrics-text;version=abc", False),
        (f"application/openmetrics-text;version={'9' * 5000}", False),
        ("text/plain;version=1.x;;=,", False),
    ],
)
def test_the_format_is_one_of_two_whatever_is_accepted(exposition: MetricsText, accept: str, openmetrics: bool) -> None:
    body, content_type = exposition.render(accept)
    kinds = {True: "application/openmetrics-text; version=1.0.0; ", False: "text/plain; version="}
    assert content_type.startswith(kinds[openmetrics])
    assert body.endswith(b"# EOF\n") == openmetrics


@given(st.lists(st.tuples(st.sampled_from(["observe", "count", "wait", "end"]), st.sampled_from(["", OPENMETRICS]))))
def test_what_is_kept_of_the_last_scrape_is_never_old(steps: list[tuple[str, str]]) -> None:
    totals, polling, moment = Totals(), PollFigures(), 0
    step, other = (diff(Tracked(), document(item(name)), now(0)) for name in ("a", "50 %s"))
    listed = [step.tracked, other.tracked, Tracked()]

    def read() -> Iterator[Part]:
        return parts(Snapshot(listed[0], totals, Figures(), at(moment), polling=polling))

    def expected(accept: str) -> list[str]:
        made = [client_metric(family) for part in read() for family in part.families()]
        collected: Any = SimpleNamespace(collect=lambda: made)
        return choose_encoder(accept)[0](collected).decode().splitlines()

    lasting = MetricsText(read)
    for number, (what, accept) in enumerate(steps):
        if what == "observe":
            totals = totals.plus(step.changes[0])
        elif what == "count":
            polling = replace(polling, delay=polling.delay + 1)
        elif what == "wait":
            moment += number
        else:
            listed.append(listed.pop(0))
        found = lasting.render(accept)[0].decode().splitlines()
        assert [line for line in found if "process_" not in line] == expected(accept)


def test_a_histogram_with_other_bounds_is_written_anew() -> None:
    shown = [Histogram((1.0,), (1, 2)), Histogram((2.0,), (1, 2))]
    text = MetricsText(lambda: [Part((object(),), lambda: [Family(POLL_DURATION, {(): shown.pop(0)})])])
    assert b'le="1.0"' in text.render("")[0]
    assert b'le="2.0"' in text.render("")[0]
