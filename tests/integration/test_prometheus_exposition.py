"""The tools of Prometheus accept /metrics."""

import subprocess
import sys
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from notbefore.metrics.families import NOTICE, Family
from notbefore.metrics.samples import MetricsSnapshot, samples
from notbefore.metrics.totals import Figures, Histogram, PollFigures
from notbefore.web.exposition import render
from support.azure import PEER, STARTED, Story, at, item
from support.needs import needs

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


@pytest.fixture(scope="module")
def families() -> list[Family]:
    story = Story().sees(0).sees(1, item("a"), item("b", EventType='We"ird\\\n'))
    story.sees(2, item("a", **STARTED), item("b"), item("c", Resources=[PEER], Description="x\ny"))
    story.sees(3, item("d", DurationInSeconds=-1))  # `a` has ended
    figures = Figures("1.0", "3.11", vm={"name": "a"})
    polling = PollFigures(last_success=1.5, flaws={"duration": 1})
    view = MetricsSnapshot(story.tracked, story.totals, figures, at(5), polling=polling)
    return list(samples(view))


def test_promtool_accepts_the_metrics_without_a_warning(families: list[Family]) -> None:
    needs("promtool")
    body, _ = render(families, "text/plain")

    result = subprocess.run(
        ["promtool", "check", "metrics"], input=body, capture_output=True, check=False, timeout=60
    )

    assert result.returncode == 0
    assert result.stdout == b""
    assert result.stderr == b""


def test_openmetrics_is_served_on_request(families: list[Family]) -> None:
    body, content_type = render(families, OPENMETRICS)

    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def test_openmetrics_is_readable_by_the_parser_of_prometheus(families: list[Family]) -> None:
    body, _ = render(families, OPENMETRICS)
    parse: Any = text_string_to_metric_families  # it has no types

    parsed = {family.name: family for family in parse(body.decode())}

    assert parsed["azure_scheduled_event_changes"].type == "counter"
    for name in ("initial_notice", "scheduled_duration", "started_duration"):
        assert parsed[f"azure_scheduled_event_{name}_seconds"].type == "histogram"
    assert "process_resident_memory_bytes" in parsed


def test_agent_imports_prometheus_client_at_first_scrape() -> None:
    code = """
import sys
import notbefore.agent.agent
from notbefore.web.app import rendered
print("prometheus_client" in sys.modules)
rendered([], "")
print("prometheus_client" in sys.modules)
"""

    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert output.stdout.split() == ["False", "True"]


def test_histogram_has_cumulative_buckets_and_time_of_creation() -> None:
    histogram = Histogram(bounds=(0.0, 30.0), counts=(1, 2, 1), sum=95.5, created=1.5)

    body, _ = render([Family(NOTICE, {("Freeze",): histogram})], OPENMETRICS)

    name = "azure_scheduled_event_initial_notice_seconds"
    lines = [line for line in body.decode().splitlines() if line.startswith(name)]

    assert lines == [
        f'{name}_bucket{{event_type="Freeze",le="0.0"}} 1.0',
        f'{name}_bucket{{event_type="Freeze",le="30.0"}} 3.0',
        f'{name}_bucket{{event_type="Freeze",le="+Inf"}} 4.0',
        f'{name}_count{{event_type="Freeze"}} 4.0',
        f'{name}_sum{{event_type="Freeze"}} 95.5',
        f'{name}_created{{event_type="Freeze"}} 1.5',
    ]


@pytest.mark.parametrize(
    ("accept", "openmetrics"),
    [
        ("", False),
        ("*/*", False),
        ("application/openmetrics-text", True),
        (
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=1.0.0;q=0.4",
            True,
        ),
        ("application/openmetrics-text;version=0.0.1,text/plain;version=0.0.4", False),
        ("application/openmetrics-text;version=abc", False),
        (f"application/openmetrics-text;version={'9' * 5000}", False),
        ("text/plain;version=1.x;;=,", False),
        ("application/openmetrics-text;q=0, text/plain", False),
        ("application/openmetrics-text; Q=0.000, */*;q=0.1", False),
        ("application/openmetrics-text;q=0.5, text/plain", False),
        ("text/plain;q=0.5, application/openmetrics-text", True),
        ("text/plain;q=0, application/openmetrics-text;q=0.1", True),
        ("application/openmetrics-text;q=x", False),
        ("application/openmetrics-text;q=nan", False),
    ],
)
def test_accept_header_selects_one_of_two_formats(
    families: list[Family], accept: str, openmetrics: bool
) -> None:
    body, content_type = render(families, accept)

    if openmetrics:
        assert content_type.startswith("application/openmetrics-text; version=1.0.0; ")
    else:
        assert content_type.startswith("text/plain; version=")

    assert body.endswith(b"# EOF\n") == openmetrics
