"""The words of a message."""

from datetime import timedelta

import pytest

from notbefore.core import duration
from notbefore.delivery.render import Renderer, built_in
from notbefore.delivery.sinks.slack import inert
from support.azure import ME, PEER, T0, at
from support.messages import STARTED, message, recording

EARLY = T0 + timedelta(seconds=60)


def test_the_title_says_what_whom_and_when() -> None:
    assert built_in(message(), EARLY).title == "Freeze of WestNO_0 in 14 min"


def test_a_message_that_is_late_does_not_claim_that_it_has_happened() -> None:
    assert built_in(message(), at(1080)).title == "Freeze of WestNO_0 was due 3 min ago"


@pytest.mark.parametrize(
    ("looks", "title"),
    [
        (({}, STARTED), "Freeze of WestNO_0 has started"),
        ((STARTED,), "Freeze of WestNO_0 has started without notice"),
        (({}, None), "Freeze of WestNO_0 canceled"),
        (({}, STARTED, None), "Freeze of WestNO_0 is over: 0 s of interruption (5 s expected)"),
        (({"Resources": [ME, PEER]}, {"Resources": [PEER]}), "Freeze no longer affects WestNO_0"),
        (({"Resources": [PEER]}, {"Resources": [ME, PEER]}), "Freeze of WestNO_0 in 14 min (changed)"),
        (({"Resources": [PEER]},), "Freeze of WestNO_1 (seen by WestNO_0) in 14 min"),
    ],
)
def test_each_change_has_its_words(looks: tuple[dict[str, str] | None, ...], title: str) -> None:
    assert built_in(message(*looks), EARLY).title == title


def test_what_is_over_says_how_long_it_took() -> None:
    over = message({}, STARTED, None)
    title = "Freeze of WestNO_0 is over: 4.2 s of interruption"
    assert built_in(recording(over, interruption_seconds=4.2), EARLY).title == f"{title} (5 s expected)"
    unknown = recording(over, interruption_seconds=4.2, expected_duration_seconds=None)
    assert built_in(unknown, EARLY).title == title


def test_what_was_not_seen_ending_says_so() -> None:
    gone = recording(message({}, STARTED, None, kind="ended"), outcome="unknown")
    assert built_in(gone, EARLY).title == "Freeze of WestNO_0 is gone: how it ended was not seen"


def test_what_is_not_known_is_not_claimed() -> None:
    text = built_in(message({"DurationInSeconds": -1, "Description": None, "NotBefore": None}), EARLY)
    assert "Expected interruption: not known" in text.plain
    assert "Not before" not in text.plain
    assert "Why" not in text.plain


def test_a_moved_not_before_says_what_it_was() -> None:
    text = built_in(message({}, {"NotBefore": "Sun, 01 Mar 2026 12:30:00 GMT"}), EARLY)
    assert "Previously: 2026-03-01 12:15:00 UTC" in text.plain
    assert "Not before: 2026-03-01 12:30:00 UTC (in 29 min)" in text.plain


def test_an_exercise_says_so_first() -> None:
    text = built_in(message(exercise=True), EARLY)
    assert text.title.startswith("[EXERCISE] Freeze")
    assert "nothing has happened" in text.plain


def test_a_reminder_counts_down() -> None:
    assert built_in(message(kind="reminder"), at(600)).title == "Freeze of WestNO_0 in 5 min (reminder)"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.34, "0.3 s"),
        (4.24, "4.2 s"),
        (7, "7 s"),
        (119, "119 s"),
        (840, "14 min"),
        (11_400, "3 h 10 min"),
        (7_200, "2 h"),
        (532_800, "6 d 4 h"),
    ],
)
def test_spans_are_read_at_a_glance(seconds: float, words: str) -> None:
    assert duration.words(seconds) == words


def test_many_names_are_counted() -> None:
    text = built_in(message({"Resources": [f"vm-{n}" for n in range(30)] + ["WestNO_0"]}), EARLY)
    assert "vm-9 and 21 more" in text.plain


def test_a_template_has_the_facts_at_hand() -> None:
    text = Renderer("{{ vm.name }} {{ event.type|upper }}", "{{ countdown }}: {{ event.description }}")(
        message(), EARLY
    )
    assert text.title == "WestNO_0 FREEZE"
    assert text.plain.startswith("in 14 min: Virtual machine is being paused")


def test_what_comes_from_azure_is_harmless_in_a_template() -> None:
    one = message({"Description": "<!channel> & <b>"})
    assert Renderer(None, "*{{ event.description }}*", inert)(one, EARLY).body == "*&lt;!channel&gt; &amp; &lt;b&gt;*"
    assert "\n" not in Renderer("{{ event.description }}", None)(message({"Description": "a\nBcc: x"}), EARLY).title


@pytest.mark.parametrize(
    "template", ["{{ event }}", "{{ record }}", "{{ [event.description] }}", "{{ event.description|safe }}"]
)
def test_so_is_what_holds_it(template: str) -> None:
    body = Renderer(None, template, inert)(message({"Description": "<!channel>"}), EARLY).body
    assert body
    assert "channel" in body
    assert "<" not in body


@pytest.mark.parametrize(
    "template",
    [
        "{{ nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{% if %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ record.update({'x': 1}) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    ],
)
def test_a_template_that_fails_falls_back_and_says_so(template: str) -> None:
    text = Renderer(template, None)(message(), EARLY)
    assert text.fallback
    assert text.title == built_in(message(), EARLY).title


def test_what_a_template_makes_is_bounded() -> None:
    assert len(Renderer(None, "{{ 'x' * 1000000 }}")(message(), EARLY).plain) == 8_000
