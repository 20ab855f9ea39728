"""Templates: their language, their bounds, and the texts that they render."""

import re
import time
from typing import Any

import pytest
from jinja2.filters import FILTERS
from msgspec.structs import replace

from notbefore.commands.rendered import failures_of
from notbefore.config.secret import Secret
from notbefore.config.sinks import (
    Alertmanager,
    Command,
    Email,
    Links,
    Messages,
    SinkConfig,
    Slack,
    Webhook,
    templates_of,
)
from notbefore.config.template import (
    MAX_RENDERED,
    MAX_SECONDS,
    MAX_SOURCE,
    RenderError,
    Template,
    link_values,
    record_values,
)
from notbefore.core.message import Message, Templated
from notbefore.core.record import Heartbeat
from notbefore.courier.html_mail import html_of
from notbefore.courier.renderer import Renderer
from notbefore.courier.sinks import email, slack
from notbefore.courier.templates import Rendering, Templates
from notbefore.wording.records import heartbeat_of
from notbefore.wording.texts import text_of
from support.azure import ME, PEER, T0
from support.messages import VM, message

CHAT = SinkConfig(slack=Slack(url=Secret("https://hooks.slack.com/services/a/b/c")))
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ENDLESS_CALLS = (
    "{% macro f(n) %}{% for i in range(9) %}{{ f(n - 1) if n }}{% endfor %}{% endmacro %}"
    "{{ f(20) }}"
)
ALERTMANAGER = SinkConfig(alertmanager=Alertmanager(urls=("http://am-0:9093",)))
VALUES: dict[str, Any] = {
    "title": "Reboot of web_0",
    "body": "The VM will be rebooted.",
    "severity": "critical",
    "links": link_values({"runbook": "https://wiki.example.org/r"}),
    "record": record_values(
        {"host.name": "web_0", "azure.scheduled_event.resources": ("web_0", "web_1")}
    ),
}


def rendered(source: str) -> str:
    return Template(source).render(VALUES).strip()


def webhook(body: str, **settings: Any) -> SinkConfig:
    return SinkConfig(webhook=Webhook(url=Secret("https://x.example"), body=body, **settings))


def render(sink: SinkConfig, about: Message | None = None, **messages: Any) -> Rendering:
    """Render a message with the templates of the sink and those in ``messages``."""
    return Templates(sink, Messages(**messages), Renderer()).render(about or message())


# ---- the language


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("[{{ severity | upper }}] {{ title }}", "[CRITICAL] Reboot of web_0"),
        ('{{ record["host.name"] }}', "web_0"),
        ('{{ record["azure.scheduled_event.resources"] | join(", ") }}', "web_0, web_1"),
        ('{{ record["azure.scheduled_event.resources"] | tojson }}', '["web_0", "web_1"]'),
        ('[{{ record["cloud.region"] }}]', "[]"),
        ('{{ record["cloud.region"] | default("nowhere") }}', "nowhere"),
        ('{{ record["cloud.region"] | tojson }}', "null"),
        ('{{ record["azure.tag.team"] | default("no team") }}', "no team"),
        ('{{ record.get("cloud.region") }}!', "!"),
        ("{{ links.runbook }}{{ links.page }}", "https://wiki.example.org/r"),
        ("{% for name, address in links.items() %}\n{{ name }}\n{% endfor %}", "runbook"),
        ("{% for number in range(3) %}{{ number * 2 }}{% endfor %}", "024"),
        (
            "{% macro bold(text) %}*{{ text }}*{% endmacro %}{{ bold(title) }}",
            "*Reboot of web_0*",
        ),
        ("  {{ title }}\n\n", "Reboot of web_0"),
    ],
)
def test_template_renders_a_text(source: str, text: str) -> None:
    assert rendered(source) == text


@pytest.mark.parametrize(
    ("source", "mistake"),
    [
        ("{% if %}", "line 1 of the template: Expected an expression"),
        ("\n{{ title", "line 2 of the template"),
        ("{{ titel }}", "the template uses titel: it sees only title, body"),
        ("{{ title | shout }}", "No filter named 'shout'"),
        ("{{ lipsum() }}", "the template uses lipsum"),
        ('{% include "/etc/passwd" %}', "a template cannot include another one"),
        ('{% import "macros" as macros %}', "a template cannot include another one"),
        ("x" * (MAX_SOURCE + 1), "16000 characters or less"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "nested too deeply"),
        ("{% for x in [1] %}" * 30 + "{% endfor %}" * 30, "nested too deeply"),
    ],
)
def test_invalid_template_is_refused_with_its_mistake(source: str, mistake: str) -> None:
    with pytest.raises(ValueError, match=re.escape(mistake)):
        Template(source)


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ('{{ record["cloud.regio"] }}', "no 'cloud.regio' in `record`: did you mean 'cloud.region"),
        ("{{ links.rota }}", "there is no 'rota' in `links`"),
        ('{{ record["azure.scheduled_event.resources"][9] }}', "UndefinedError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ('{{ "\\ud800" }}', "UnicodeEncodeError"),
        ("{{ range(3) | tojson }}", "has no JSON form"),
        ("{{ title.__class__.__mro__ }}", "SecurityError"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", "SecurityError"),
        ('{{ record.update({"host.name": "x"}) }}', "SecurityError"),
        ('{{ record.values.__globals__["os"] }}', "has no attribute '__globals__'"),
    ],
)
def test_failing_expression_is_reported_with_its_cause(source: str, cause: str) -> None:
    with pytest.raises(RenderError, match=re.escape(cause)):
        rendered(source)


# ---- the bounds


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        (ENDLESS, "1 s"),
        (ENDLESS_CALLS, "1 s"),
        ("{% for a in range(99999) %}{{ body }}{% endfor %}", f"more than {MAX_RENDERED} char"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "RecursionError"),
        ("{% for a in range(999999999) %}{% endfor %}", "OverflowError"),
        ("{{ 'x' * 10000000000 }}", "SecurityError"),
        ("{{ 9 ** 9 ** 9 ** 9 }}", "SecurityError"),
    ],
)
def test_endless_template_is_stopped(source: str, cause: str) -> None:
    started = time.thread_time()  # the bound is one of work: a busy machine takes longer

    with pytest.raises(RenderError, match=cause):
        rendered(source)

    assert time.thread_time() - started < 20


def test_nothing_is_computed_before_a_template_is_rendered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed: list[str] = []
    monkeypatch.setitem(FILTERS, "upper", computed.append)
    constant = "'x' | upper"

    Template(f"{{{{ {constant} }}}}{{% if {constant} %}}{{% endif %}}{{% set x = {constant} %}}")

    assert computed == []


@pytest.mark.parametrize(
    "source",
    [
        "{% set a, b = 1, 2 %}{{ a }}{{ b }}",
        "{% for a in range(2) %}{{ loop.index }}{{ a }}{% endfor %}",
        "{% macro m(a, b=1) %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1) }}",
        "{% macro m() %}{{ caller(1) }}{% endmacro %}{% call(a) m() %}{{ a }}{% endcall %}",
        "{% with a = title %}{{ a }}{% endwith %}",
        "{% set ns = namespace(a=1) %}{% set ns.a = 2 %}{{ ns.a }}",
        "{% filter upper %}{{ title }}{% endfilter %}",
        "{% set a %}{{ title }}{% endset %}{{ a }}",
    ],
)
def test_template_may_use_the_names_that_it_declares(source: str) -> None:
    assert rendered(source)


# ---- the texts of messages


def test_templates_replace_title_and_body_of_a_text() -> None:
    sent = render(CHAT, title="[{{ severity }}] {{ title }}", body="{{ body }}\n\nTeam: web")

    text = text_of(sent.message, Messages(links=Links(runbook="https://wiki.example.org/")))

    assert sent.failures == ()
    assert text.title == "[info] Freeze of WestNO_0 in 14 min"
    assert text.whole.startswith("The VM will be paused")
    assert text.whole.endswith("Reported by: WestNO_0\n\nTeam: web")
    assert [link.name for link in text.links] == ["Runbook"]


def test_title_of_a_template_is_one_line() -> None:
    text = text_of(render(CHAT, title="a\nb\u202ec").message, Messages())

    assert "\n" not in text.title
    assert "\u202e" not in text.title


def test_template_mentions_only_people_named_by_its_author() -> None:
    about = message({"Description": "@channel", "Resources": [ME, "@all"]})
    source = """@here {{ record["azure.scheduled_event.description"] }}
    {{ record["azure.scheduled_event.resources"] | join(" ") }}"""

    sent = render(CHAT, about, title="@here {{ title }}", body=source)

    text = text_of(sent.message, Messages())
    assert text.title.startswith("@here Freeze of")
    assert text.summary.split() == ["@here", "@\u200bchannel", ME, "@\u200ball"]


def test_template_sees_the_built_in_text_without_links() -> None:
    links = Links(runbook="https://wiki.example.org/{event_type}")
    about = message()

    sent = render(CHAT, about, body="{{ body }}|{{ links.runbook }}|{{ links.page }}", links=links)

    built_in = text_of(about, Messages(links=links)).plain
    assert sent.message.templated.body == f"{built_in}|https://wiki.example.org/Freeze|"


def test_slack_adds_no_line_to_the_body_of_a_template() -> None:
    sent = render(CHAT, body="Only this").message

    content = slack.content(sent, text_of(sent, Messages()))

    body, _footer = content["attachments"][0]["blocks"]
    assert body["text"]["text"] == "Only this"


def test_mail_has_only_the_body_of_a_template() -> None:
    links = Links(runbook="https://wiki.example.org/r")
    sent = render(CHAT, body="First <line>\nsecond", links=links).message

    html = html_of(text_of(sent, Messages(links=links)), "#c4314b")

    assert "First &lt;line&gt;<br>second" in html
    assert "wiki.example.org" not in html
    assert "Delivery" not in html


def test_title_of_a_template_is_the_subject_of_a_mail() -> None:
    account = Email(host="mail.example.org", sender="vm@example.org", to=("ops@example.org",))
    sent = render(CHAT, title="[PROD] {{ record['azure.scheduled_event.type'] }}").message

    mail = email.compose(sent, text_of(sent, Messages()), account)

    assert mail["Subject"] == "[PROD] Freeze"
    assert mail["Thread-Topic"] == "[PROD] Freeze"


def test_failing_template_is_left_out_and_named() -> None:
    sent = render(CHAT, title="{{ title }}!", body="{{ 1 // 0 }}")

    assert sent.message.templated == Templated(title="Freeze of WestNO_0 in 14 min!")
    (failure,) = sent.failures
    assert failure.key == "messages.body"
    assert "ZeroDivisionError" in failure.text


@pytest.mark.parametrize("title", ["{{ links.page }}", " \n"])
def test_empty_title_is_left_out(title: str) -> None:
    sent = render(CHAT, title=title)

    (failure,) = sent.failures
    assert sent.message.templated.title is None
    assert "an empty title" in failure.text


def test_endless_template_is_rendered_for_one_sample_only() -> None:
    started = time.thread_time()

    failures = failures_of("chat", CHAT, Messages(body=ENDLESS))

    assert list(failures) == ["messages.body"]
    assert time.thread_time() - started < 2 * MAX_SECONDS


def test_request_of_a_webhook_sees_title_and_body_of_the_templates() -> None:
    sink = webhook('{"text": {{ title | tojson }}, "more": {{ body | tojson }}}')

    sent = render(sink, title="T", body="B")

    assert sent.message.templated.request == '{"text": "T", "more": "B"}'


def test_request_keeps_its_last_line_end() -> None:
    sink = webhook("event 1\n", headers={"Content-Type": Secret("text/plain")})

    sent = render(sink, body="\n{{ severity }}\n\n")

    assert sent.message.templated.request == "event 1\n"
    assert sent.message.templated.body == "info"


NO_JSON = '{"text": {{ title }}}'  # the title has no quotation marks


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param({}, id="default"),
        pytest.param({"content-type": Secret("application/json; charset=utf-8")}, id="JSON"),
        pytest.param({"content-type": Secret("application/cloudevents+json")}, id="CloudEvents"),
    ],
)
def test_request_must_be_json_when_its_content_type_is(headers: dict[str, Secret]) -> None:
    sent = render(webhook(NO_JSON, headers=headers))

    (failure,) = sent.failures
    assert sent.message.templated.request is None
    assert "valid JSON" in failure.text


def test_request_may_be_any_text_when_its_content_type_is() -> None:
    sent = render(webhook(NO_JSON, headers={"content-type": Secret("text/plain")}))

    assert sent.failures == ()
    assert sent.message.templated.request == '{"text": Freeze of WestNO_0 in 14 min}'


def test_alert_has_the_same_text_from_every_vm() -> None:
    looks = {"Resources": [ME, PEER]}
    template = (
        'On {{ record["azure.scheduled_event.resources"] | join(" ") }}{{ record["host.name"] }}'
    )
    other_vm = replace(VM, name=PEER, vm_id="other")

    of_this_vm = render(ALERTMANAGER, message(looks, vm=VM), title=template)
    of_other_vm = render(ALERTMANAGER, message(looks, vm=other_vm), title=template)

    assert of_this_vm.message.templated.title == "On WestNO_0 WestNO_1"
    assert of_other_vm.message.templated.title == "On WestNO_0 WestNO_1"


def test_heartbeat_has_no_template() -> None:
    heartbeat = heartbeat_of(VM, (), "1.0", T0)
    about = replace(message(), kind="heartbeat", content=heartbeat)
    assert isinstance(about.content, Heartbeat)

    assert render(CHAT, about, title="x") == Rendering(about)


def test_sink_that_sends_records_uses_no_template() -> None:
    command = SinkConfig(command=Command(command=("/bin/true",)))
    plain = SinkConfig(webhook=Webhook(url=Secret("https://x.example")))
    messages = Messages(title="{{ title }}")

    assert templates_of(command, messages) == {}
    assert templates_of(plain, messages) == {}
    assert templates_of(CHAT, messages) == {"messages.title": "{{ title }}"}
