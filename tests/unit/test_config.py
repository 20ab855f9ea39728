"""The configuration: complete without a file, and what is given where.

All its mistakes at once, with their places.
"""

import json
import re
import sys
from pathlib import Path

import pytest

from notbefore.commands.main import main
from notbefore.config.load import load
from notbefore.config.model import Config, Server, default_state_dir, host_and_port
from notbefore.config.secret import Secret, secrets_in
from notbefore.core.duration import Duration
from notbefore.errors import ConfigError

MANY = """\
imds:
  intervall: 1s
sinkz: {}
sinks:
  slack: {url_file: hook}
  oncall: {slack: {url: 'ftp://x', timeout: 5}}
  mail:
    email: {host: mail.example.org, to: [ops@example.org, nobody], from: vm@example.org}
routes:
  - {sinks: [oncall, oncal]}
approval:
  rules: [{match: all}, {match: {event_type: Freez}}]
"""
FOUND = [
    (2, 3, "imds.intervall"),
    (3, 1, "sinkz"),
    (5, 11, "sinks.slack.url_file"),
    (6, 20, "sinks.oncall.slack.url"),
    (6, 36, "sinks.oncall.slack.timeout"),
    (8, 59, "sinks.mail.email.to[1]"),
    (10, 6, "routes[0].sinks"),
    (12, 34, "approval.rules[1].match.event_type"),
]


def _written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "notbefore.yml"
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    return path


def read(tmp_path: Path, text: str, **environment: str) -> Config:
    return load(_written(tmp_path, text), environment, {})


@pytest.mark.parametrize("text", ["", "\ufeff# nothing, after the mark of some editors\n", "{}"])
def test_an_empty_file_is_a_working_agent(tmp_path: Path, text: str) -> None:
    config = read(tmp_path, text)
    assert config == load(None, {}, {}) == Config()
    assert config.imds.endpoint == "http://169.254.169.254"
    assert config.server.listen == "127.0.0.1:10169"
    assert config.imds.interval.seconds == 1.0


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    path = _written(tmp_path, "imds: {interval: 2s, endpoint: 'http://file'}\nvm: {name: file}\n")
    environment = {
        "NOTBEFORE_IMDS__ENDPOINT": "http://environment",
        "NOTBEFORE_VM__NAME": "environment",
        "OTHER__X": "y",
    }
    config = load(path, environment, {"vm.name": "words", "state.dir": None})
    assert config.imds.interval == Duration("2s")
    assert config.imds.endpoint == "http://environment"
    assert config.vm.name == "words"


def test_every_key_may_come_from_a_variable(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").touch()
    config = read(
        tmp_path,
        "sinks: {OnCall: {slack: {url_file: another}}}",
        NOTBEFORE_SINKS__ONCALL__SLACK__URL_ENV="URL",
        NOTBEFORE_SINKS__B__WEBHOOK__URL="https://example.org",
        NOTBEFORE_SINKS__B__WEBHOOK__HEADERS__KEY__ENV="URL",
        NOTBEFORE_SINKS__B__WEBHOOK__CA_FILE="ca.pem",
        NOTBEFORE_IMDS__DISCOVER="false",
        NOTBEFORE_SERVER__ALLOWED_HOSTS="a, *.b",
        URL="https://hooks.slack.com/services/x",
    )
    assert secrets_in(config.sinks["OnCall"].settings) == {"url": Secret("URL", "env")}
    assert config.sinks["b"].webhook is not None
    assert config.sinks["b"].webhook.ca_file == str(tmp_path / "ca.pem")
    assert (config.imds.discover, config.server.allowed_hosts) == (False, ("a", "*.b"))


def test_what_stands_without_quotes_is_what_its_key_expects(tmp_path: Path) -> None:
    text = """\
vm: {name: 0123}
imds: {api_version: 2020-07-01, discover: false}
sinks: {m: {email: {host: h, from: a@example.org, to: b@example.org, port: 2525}}}
routes: [{match: {zone: 1, tags: {env: [no, 1:30]}, duration: {min: 9}}, sinks: m}]
"""
    config = read(tmp_path, text)
    assert (config.vm.name, config.imds.api_version, config.imds.discover) == (
        "0123",
        "2020-07-01",
        False,
    )
    assert config.sinks["m"].email is not None
    assert (config.sinks["m"].email.port, config.sinks["m"].email.to) == (2525, ("b@example.org",))
    match = config.routes[0].match
    assert (match.zone, match.tags, config.routes[0].sinks) == (
        ("1",),
        {"env": ("no", "1:30")},
        ("m",),
    )
    assert match.duration is not None
    assert match.duration.min == 9


def test_systemd_says_where_the_state_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATE_DIRECTORY", "/run/a:/run/b")
    assert default_state_dir() == Path("/run/a")
    monkeypatch.delenv("STATE_DIRECTORY")
    usual = r"C:\ProgramData\notbefore" if sys.platform == "win32" else "/var/lib/notbefore"
    assert default_state_dir() == Path(usual)


@pytest.mark.parametrize(
    ("listen", "host", "port"),
    [
        (":80", "", 80),
        ("127.0.0.1:0", "127.0.0.1", 0),
        ("[::]:65535", "::", 65535),
        ("[fe80::1%eth0]:1", "fe80::1%eth0", 1),
        ("vm-1.example.org:10169", "vm-1.example.org", 10169),
    ],
)
def test_an_address_to_listen_at_has_two_parts(listen: str, host: str, port: int) -> None:
    assert host_and_port(listen) == (host, port)
    assert Server(listen=listen).listen == listen


def test_who_sends_nothing_needs_no_secrets(tmp_path: Path) -> None:
    path = _written(tmp_path, "sinks: {a: {slack: {url_file: nowhere}}}\n")
    with pytest.raises(ConfigError):
        load(path, {}, {})
    assert "a" in load(path, {}, {}, sending=False).sinks


def test_every_path_of_a_file_is_relative_to_the_configuration(tmp_path: Path) -> None:
    key = "Endpoint=sb://a/;SharedAccessKeyName=root;SharedAccessKey=b;EntityPath=c"
    (tmp_path / "key").write_text(key, encoding="utf-8")
    (tmp_path / "ca.pem").touch()
    (tmp_path / "blob").write_text("AccountName=a;AccountKey=b", encoding="utf-8")
    config = read(
        tmp_path,
        "otlp: {endpoint: 'https://collector:4318', ca_file: ca.pem}\nserver: {web_config_file:"
        " web.yml}\nfleet: {hub: {connection_string_file: key}, checkpoints: {connection_string:"
        " {file: blob}, container: c}, inventory_file: vms.txt}\n",
    )
    assert config.otlp is not None
    assert config.fleet is not None
    assert config.fleet.checkpoints is not None
    files = (config.otlp.ca_file, config.server.web_config_file, config.fleet.inventory_file)
    assert files == tuple(str(tmp_path / name) for name in ("ca.pem", "web.yml", "vms.txt"))
    assert config.fleet.hub.connection_string == Secret(str(tmp_path / "key"), "file")
    assert config.fleet.checkpoints.connection_string == Secret(str(tmp_path / "blob"), "file")


@pytest.mark.usefixtures("log_as_before")
def test_all_mistakes_are_shown_at_once_as_lines_and_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _written(tmp_path, MANY)
    assert main(["check-config", str(path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1:3] for line in lines] == [
        [f"{path}:{row}:{column}", key] for row, column, key in FOUND
    ]
    assert main(["check-config", "--json", str(path)]) == 2
    said = json.loads(capsys.readouterr().out)
    assert [(one["line"], one["column"], one["key"]) for one in said["mistakes"]] == FOUND
    assert (said["ok"], str(path) in said["error"]) == (False, True)
    assert main(["check-config", "--json", str(_written(tmp_path, "log: {level: debug}"))]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"log:\n  level: \xff\n", ":2:10: this is not YAML: invalid leading UTF-8 octet"),
        (b"\nimds: " + b"[" * 30_000, ":2:38: lists and mappings are nested more than 32 deep"),
        (b"imds: " + b"{a: " * 5_000, ":1:131: lists and mappings are nested more than 32 deep"),
        (b"- a\n" * 60_000, ": more than 20000 values: is this the right file?"),
        (b"#" * 300_000, ": more than 262144 bytes: is this the right file?"),
        (
            b"sinks: {m: {email: {port: " + b"1" * 10_000 + b"}}}",
            " sinks.m.email.port: expected a whole number, got text",
        ),
        (
            b"messages: {advice: {Reboot: " + b"x" * 2_001 + b"}}",
            " expected a text of 2000 characters or less",
        ),
        (
            b"server: {listen: '" + b"a" * 300 + b":1'}",
            " server.listen: expected HOST:PORT such as 127.0.0.1:10169 or",
        ),
    ],
)
def test_what_is_too_much_is_refused_with_its_place(
    tmp_path: Path, content: bytes, expected: str
) -> None:
    path = tmp_path / "notbefore.yml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(expected)) as caught:
        load(path, {}, {})
    assert str(caught.value).startswith(str(path))
