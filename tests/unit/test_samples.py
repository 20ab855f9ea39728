"""Every metric that is defined has samples."""

from notbefore.core.tracked import Tracked
from notbefore.metrics import families
from notbefore.metrics.families import Metric
from notbefore.metrics.samples import MetricsSnapshot, samples
from notbefore.metrics.totals import (
    ConfigFigures,
    CourierFigures,
    Figures,
    OutboxView,
    PollFigures,
    Totals,
    named,
)
from support.azure import STARTED, Story, at, item


def test_each_defined_metric_has_samples() -> None:
    story = Story().sees(0).sees(1, item("scheduled"), item("started"), item("finished"))
    story.sees(2, item("scheduled"), item("started", **STARTED), item("finished", **STARTED))
    story.sees(3, item("scheduled"), item("started", **STARTED), gap=2.0)
    approvals = {named(rule="drained", result="approved"): 1}
    snapshot = MetricsSnapshot(
        tracked=story.tracked,
        totals=Totals(
            changes=story.totals.changes,
            notice=story.totals.notice,
            scheduled=story.totals.scheduled,
            started=story.totals.started,
            interruption=story.totals.interruption,
            ends=story.totals.ends,
            approvals=approvals,
        ),
        figures=Figures(
            courier=CourierFigures(starts={"due": 1}, template_failures={"chat": 0}),
            config=ConfigFigures(loaded=1.0),
            otlp_exports={("metrics", "success"): 1},
            auth_failures=0,
            vm={"name": "web_0"},
        ),
        now=at(4),
        outbox=OutboxView(oldest={("chat", "info"): 0.0}),
        sinks=("chat",),
        polling=PollFigures(
            last_success=1.0,
            documents_rejected={"empty": 1},
            flaws={"duration": 1},
        ),
    )

    sampled = {family.metric for family in samples(snapshot)}

    defined = {value for value in vars(families).values() if isinstance(value, Metric)}
    assert defined - sampled == set()


def test_snapshot_without_values_has_no_samples_of_events() -> None:
    snapshot = MetricsSnapshot(Tracked(), Totals(), Figures(), at(0))

    names = [family.metric.name for family in samples(snapshot)]

    assert not [name for name in names if name.startswith("azure_scheduled_event_")]
