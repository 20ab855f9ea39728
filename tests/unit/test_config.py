"""The configuration: complete without a file, and every mistake named with file, line, path and expectation."""

import re
from pathlib import Path

import pytest

from notbefore.config.load import load
from notbefore.config.model import Config, Server, default_state_dir, host_and_port
from notbefore.config.secret import Secret
from notbefore.core.duration import Duration
from notbefore.errors import ConfigError

NONE: dict[str, str | None] = {}


def _written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "notbefore.yml"
    path.write_text(text, encoding="utf-8")
    return path


def read(tmp_path: Path, text: str, **environment: str) -> Config:
    return load(_written(tmp_path, text), environment, NONE)


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}"])
def test_an_empty_file_is_a_working_agent(tmp_path: Path, text: str) -> None:
    config = read(tmp_path, text)
    assert config == load(None, {}, NONE) == Config()
    assert config.imds.endpoint == "http://169.254.169.254"
    assert config.server.listen == "127.0.0.1:10169"
    assert config.imds.interval.seconds == 1.0


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "notbefore.yml"
    path.write_text("imds: {interval: 2s, endpoint: 'http://file'}\nvm: {name: file}\n", encoding="utf-8")
    environment = {
        "NOTBEFORE_IMDS__ENDPOINT": "http://environment",
        "NOTBEFORE_VM__NAME": "environment",
        "OTHER__X": "y",
    }
    config = load(path, environment, {"vm.name": "words", "state.dir": None})
    assert config.imds.interval == Duration("2s")
    assert config.imds.endpoint == "http://environment"
    assert config.vm.name == "words"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(
            (f"server: {{listen: '{listen}'}}", ":1: server.listen: expected HOST:PORT such as 127.0.0.1:10169 or")
            for listen in ("127.0.0.1", "::1:80", "[::1]", "localhost:", "x:65536", "a b:80", "[]:1", "x:\uff11")
        ),
        ("imds: !!python/object/apply:os.system ['true']\n", ":1: tags (!name) are not supported: quote what is"),
        ("\nimds: " + "[" * 30_000, ":2: lists and mappings are nested more than 32 deep"),
        ("imds: " + "{a: " * 5_000, ":1: lists and mappings are nested more than 32 deep"),
        ("a: {<<: {b: 1}}\n", ":1: aliases (*name) and merge keys (<<) are not supported"),
        ("- a\n" * 60_000, ": more than 20000 values"),
        ("#" * 300_000, "more than 262144 bytes"),
        ("sinks: {m: {email: {port: " + "1" * 10_000 + "}}}\n", ":1: sinks.m.email.port: expected a whole number"),
        ("sinks: {m: {email: {port: 0}}}\n", ":1: sinks.m.email.port: expected a port from 1 to 65535"),
        ("[a]: 2\n", "expected one line of text as the name of a section"),
        ("sinks:\n a: {sl\r\rack}\n", "expected one line of text as the name of a section"),
        ("routes: [{sinks: [], match: {}, sinks: []}]\n", ":1: routes[0].sinks: it is given twice: first at "),
    ],
)
def test_a_mistake_is_named_with_its_place(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert str(caught.value).startswith(str(tmp_path / "notbefore.yml"))
    said = re.sub(r"(yml:\d+):\d+", r"\1", str(caught.value))  # columns have a test of their own
    assert expected in said


def test_what_stands_without_quotes_is_what_its_key_expects(tmp_path: Path) -> None:
    text = """\
vm: {name: 0123}
imds: {api_version: 2020-07-01, discover: false}
sinks: {m: {email: {host: h, from: a@example.org, to: [b@example.org], port: 2525}}}
routes: [{match: {zone: 1, tags: {env: [no, 1:30]}, duration: {min: 9}}}]
"""
    config = load(_written(tmp_path, text), {}, NONE, sending=False)
    assert (config.vm.name, config.imds.api_version, config.imds.discover) == ("0123", "2020-07-01", False)
    assert config.sinks["m"].email is not None
    assert config.sinks["m"].email.port == 2525
    match = config.routes[0].match
    assert (match.zone, match.tags) == (("1",), {"env": ("no", "1:30")})
    assert match.duration is not None
    assert match.duration.min == 9


def test_a_mistake_in_the_environment_names_the_variable(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"NOTBEFORE_IMDS__INTERVAL.*expected a duration"):
        read(tmp_path, "", NOTBEFORE_IMDS__INTERVAL="soon")
    with pytest.raises(ConfigError, match="is not a section"):
        read(tmp_path, "", NOTBEFORE_IMDS__INTERVAL="1s", NOTBEFORE_IMDS__INTERVAL__X="1s")


def test_who_may_ask_is_configured_in_the_file_or_in_the_environment(tmp_path: Path) -> None:
    server = read(tmp_path, "server: {web_config_file: web.yml, allowed_hosts: [a, '*.b']}\n").server
    assert server.web_config_file == str(tmp_path / "web.yml")
    environment = {"NOTBEFORE_SERVER__ALLOWED_HOSTS": "a, *.b", "NOTBEFORE_SERVER__INSECURE": "true"}
    server = read(tmp_path, "", **environment).server
    assert (server.allowed_hosts, server.insecure) == (("a", "*.b"), True)
    with pytest.raises(ConfigError, match=r"server\.insecure: expected true or false, got 'yes'"):
        read(tmp_path, "server: {insecure: 'yes'}\n")


def test_systemd_says_where_the_state_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATE_DIRECTORY", "/run/a:/run/b")
    assert default_state_dir() == Path("/run/a")
    monkeypatch.delenv("STATE_DIRECTORY")
    assert default_state_dir() == Path("/var/lib/notbefore")


@pytest.mark.parametrize("content", [b"log:\n  level: \xff\n", b"log:\n" + "level: info\n".encode("utf-16")])
def test_bytes_that_are_not_utf_8_are_refused_with_their_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notbefore.yml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"notbefore\.yml:2: this is not UTF-8 text"):
        load(path, {}, NONE)
    path.write_bytes("\ufefflog: {level: debug}\n".encode())  # as some editors begin a file
    assert load(path, {}, NONE).log.level == "debug"


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
    path = tmp_path / "c.yml"
    path.write_text("sinks: {a: {slack: {url_file: nowhere}}}\n", encoding="utf-8")
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
        "otlp: {endpoint: 'https://collector:4318', ca_file: ca.pem}\n"
        "fleet: {hub: {connection_string_file: key}, checkpoints: {connection_string: {file: blob}, container: c},"
        " inventory_file: vms.txt}\n",
    )
    assert config.otlp is not None
    assert config.otlp.ca_file == str(tmp_path / "ca.pem")
    assert config.fleet is not None
    assert config.fleet.inventory_file == str(tmp_path / "vms.txt")
    assert config.fleet.hub.connection_string == Secret(str(tmp_path / "key"), "file")
    assert config.fleet.checkpoints is not None
    assert config.fleet.checkpoints.connection_string == Secret(str(tmp_path / "blob"), "file")
