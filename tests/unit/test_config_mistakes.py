"""All mistakes of a configuration in one go, with line and column; what was silent once; what is never shown."""

import json
from pathlib import Path

import pytest

from notbefore.commands.main import main
from notbefore.config.load import examine, load
from notbefore.config.secret import Secret
from notbefore.errors import ConfigError

pytestmark = pytest.mark.usefixtures("log_as_before")
MANY = """\
imds:
  intervall: 1s
  discover: maybe
sinkz: {}
sinks:
  slack: {url_file: hook}
  oncall: {slack: {url: 'ftp://x', timeout: 5s}}
  mail:
    email:
      host: mail.example.org:587
      port: "25a"
      to: [ops@example.org, nobody]
      from: vm@example.org
routes:
  - {sinks: [oncall, oncal]}
  - match: {scope: [self, mine]}
approval:
  rules: [{match: all}, {match: {event_type: Freez}}]
"""
FOUND = [
    (2, 3, "imds.intervall"),
    (3, 3, "imds.discover"),
    (4, 1, "sinkz"),
    (6, 11, "sinks.slack.url_file"),
    (7, 20, "sinks.oncall.slack.url"),
    (10, 7, "sinks.mail.email.host"),
    (11, 7, "sinks.mail.email.port"),
    (12, 29, "sinks.mail.email.to[1]"),
    (15, 6, "routes[0].sinks"),
    (16, 27, "routes[1].match.scope[1]"),
    (18, 34, "approval.rules[1].match.event_type"),
]


def given(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "notbefore.yml"
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    return path


def mistakes(tmp_path: Path, text: str, **environment: str) -> list[str]:
    found = examine(given(tmp_path, text), environment, {})[2]
    return [f"{one.key}: {one.text}" for one in found]


def test_all_mistakes_are_named_at_once_with_line_and_column(tmp_path: Path) -> None:
    path = given(tmp_path, MANY)
    with pytest.raises(ConfigError) as caught:
        load(path, {}, {})
    assert [(one.place.line, one.place.column, one.key) for one in caught.value.mistakes] == FOUND
    assert {one.place.origin for one in caught.value.mistakes} == {str(path)}
    assert all(f"{path}:{line}:{column}: {key}: " in str(caught.value) for line, column, key in FOUND)


def test_the_command_shows_them_all_as_lines_and_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = given(tmp_path, MANY)
    assert main(["check-config", str(path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in lines] == [f"{path}:{line}:{column}" for line, column, _ in FOUND]
    assert main(["check-config", "--json", str(path)]) == 2
    said = json.loads(capsys.readouterr().out)
    assert [(one["line"], one["column"], one["key"]) for one in said["mistakes"]] == FOUND
    assert (said["ok"], str(path) in said["error"]) == (False, True)
    assert main(["check-config", "--json", str(given(tmp_path, "log: {level: debug}"))]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True


def test_a_password_that_begins_with_an_exclamation_mark_is_not_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quote what is to be text") as caught:
        load(given(tmp_path, "sinks: {a: {pagerduty: {routing_key: !hunter2, expire_after: 1d}}}"), {}, {})
    assert "hunter2" not in str(caught.value)


def test_what_only_a_library_or_this_machine_can_say_is_among_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """\
server: {listen: '0.0.0.0:1'}
sinks:
  a: {slack: {url: https://hooks.slack.com/services/x, title: '{% if %}'}}
  b: {apprise: {url: 'nosuch://x'}}
routes: [{sinks: [nobody]}]
"""
    assert main(["check-config", "--json", str(given(tmp_path, text))]) == 2
    said = json.loads(capsys.readouterr().out)
    assert [(one["line"], one["key"]) for one in said["mistakes"]] == [
        (1, "server.listen"),
        (3, "sinks.a.slack.title"),
        (4, "sinks.b.apprise"),
        (5, "routes[0].sinks"),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sinks: {a: {pagerduty: {routing_key_file: two}}}", "sinks.a.pagerduty.routing_key_file: expected the 32"),
        ("sinks: {a: {webhook: {url_file: two}}}", "sinks.a.webhook.url_file: expected an address without blanks"),
        ("sinks: {a: {webhook: {url: https://x, secret_file: two}}}", "secret_file: expected one line: this secret"),
    ],
)
def test_a_secret_of_two_lines_is_a_mistake(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "two").write_text("https://example.org\nhttps://example.org\n", encoding="utf-8")
    found = mistakes(tmp_path, text)
    assert any(said in one for one in found), found


def test_a_byte_that_is_no_text_is_said_with_its_place(tmp_path: Path) -> None:
    path = given(tmp_path, "log: {level: info}\nvm: {name: a\0b}\n")
    with pytest.raises(ConfigError, match=r"notbefore\.yml:2:\d+: this is not YAML: "):
        load(path, {}, {})


@pytest.mark.parametrize(
    "text",
    [
        "fleet: {hub: {namespace: n, hub: h}, checkpoints: {container_url: 'https://a.example.org/c?sig=hunter2'}}",
        "imds: {endpoint: 'http://user:hunter2@169.254.169.254'}",
        "imds: {endpoint: 'http://169.254.169.254?key=hunter2'}",
        "sinks: {a: {alertmanager: {urls: ['http://user:hunter2@am:9093']}}}",
        "otlp: {endpoint: 'http://collector:4318/?key=hunter2'}",
    ],
)
def test_a_key_in_an_address_is_refused_and_not_shown(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check-config", str(given(tmp_path, text))]) == 2
    assert "hunter2" not in "".join(capsys.readouterr())


def test_a_list_of_one_needs_no_brackets_and_a_variable_takes_commas(tmp_path: Path) -> None:
    text = "sinks: {m: {email: {host: m, from: a@b, to: c@d}}}\nroutes: [{match: {zone: 1}, sinks: m}]"
    config = load(given(tmp_path, text), {"NOTBEFORE_SERVER__ALLOWED_HOSTS": "a, b"}, {})
    assert config.sinks["m"].email is not None
    assert (config.sinks["m"].email.to, config.routes[0].sinks, config.routes[0].match.zone) == (
        ("c@d",),
        ("m",),
        ("1",),
    )
    assert config.server.allowed_hosts == ("a", "b")


def test_every_key_may_come_from_a_variable(tmp_path: Path) -> None:
    variables = {
        "NOTBEFORE_SINKS__A__SLACK__URL_ENV": "URL",
        "NOTBEFORE_SINKS__B__WEBHOOK__URL": "https://example.org",
        "NOTBEFORE_SINKS__B__WEBHOOK__HEADERS__KEY__ENV": "URL",
        "NOTBEFORE_SINKS__B__WEBHOOK__CA_FILE": "ca.pem",
        "NOTBEFORE_IMDS__DISCOVER": "false",
        "URL": "https://hooks.slack.com/services/x",
    }
    (tmp_path / "ca.pem").touch()
    config = load(given(tmp_path, "{}"), variables, {"imds.endpoint": "http://127.0.0.1"})
    assert config.sinks["a"].secrets == {"url": Secret("URL", "env")}
    assert config.sinks["b"].webhook is not None
    assert config.sinks["b"].webhook.ca_file == str(tmp_path / "ca.pem")
    assert (config.imds.discover, config.imds.endpoint) == (False, "http://127.0.0.1")
