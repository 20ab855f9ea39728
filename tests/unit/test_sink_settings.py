"""Sinks and secrets in the configuration: missing libraries, sources of secrets, and redaction."""

import json
import os
import re
from base64 import b64encode, encodebytes, urlsafe_b64encode
from collections.abc import Callable
from html import escape
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest

from notbefore.config.lint import warnings
from notbefore.config.load import examine, load
from notbefore.config.secret import Secret, secrets_in
from notbefore.config.sinks import Alertmanager, SinkConfig, Webhook
from notbefore.courier.orders import Orders, seal, unseal
from notbefore.errors import ConfigError
from notbefore.net.redact import Redactor, known_secrets, plain


@pytest.mark.parametrize(
    ("missing", "text", "extra"),
    [
        ("apprise", "sinks: {a: {apprise: {url: x}}}", "apprise"),
        ("slack_sdk", "sinks: {a: {slack: {token: xoxb-1, channel: ops}}}", "slack"),
        ("opentelemetry.exporter.otlp.proto.http", "otlp: {}", "otlp"),
        (
            "opentelemetry.exporter.otlp.proto.grpc",
            "sinks: {rec: {otlp_logs: {protocol: grpc}}}",
            "otlp-grpc",
        ),
    ],
)
def test_missing_library_is_named_with_its_extra(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    missing: str,
    text: str,
    extra: str,
) -> None:
    config = tmp_path / "notbefore.yaml"
    config.write_text(text, encoding="utf-8")

    def find_spec(name: str) -> object | None:
        return None if name == missing else object()

    monkeypatch.setattr("importlib.util.find_spec", find_spec)

    with pytest.raises(ConfigError, match=rf"pip install 'azure-notbefore\[{extra}\]'"):
        load(config, {}, {})


ON_POSIX = pytest.mark.skipif(
    not hasattr(os, "geteuid"), reason="Windows has access lists instead of modes"
)


def warnings_of(path: Path) -> list[str]:
    config, places, _ = examine(path, {}, {})
    return warnings(config, places)


@ON_POSIX
def test_configuration_has_no_warnings_when_only_its_owner_can_write(tmp_path: Path) -> None:
    path = tmp_path / "notbefore.yaml"
    path.write_text("{}", encoding="utf-8")

    assert warnings_of(path) == []


@ON_POSIX
def test_configuration_has_warnings_when_everyone_can_write(tmp_path: Path) -> None:
    path = tmp_path / "notbefore.yaml"
    web_config = tmp_path / "web.yml"
    web_config.write_text("", encoding="utf-8")
    path.write_text(f"server: {{web_config_file: {web_config}}}", encoding="utf-8")
    assert warnings_of(path) == []

    path.chmod(0o646)
    web_config.chmod(0o622)

    writable = [text for text in warnings_of(path) if "can be written by every user" in text]
    to_be_changed = [text.rpartition("chmod o-w ")[2] for text in writable]
    assert to_be_changed == [str(path), str(web_config)]


# ---- where secrets come from


def test_courier_gets_the_texts_of_secrets(tmp_path: Path) -> None:
    environment = {"CREDENTIALS_DIRECTORY": str(tmp_path), "KEY": "from-environment"}
    # with a byte order mark, as an editor on Windows writes
    (tmp_path / "file").write_text("from-file", encoding="utf-8-sig")
    (tmp_path / "credential").write_text("from-credential", encoding="utf-8-sig")
    headers = {
        "file": Secret(str(tmp_path / "file"), "file"),
        "credential": Secret("credential", "credential"),
        "env": Secret("KEY", "env"),
    }
    sink = SinkConfig(webhook=Webhook(url=Secret("https://example.org"), headers=headers))

    orders = unseal(seal(Orders({"hook": sink}), environment))

    secrets = secrets_in(orders.sinks["hook"].settings)
    revealed = {key: secret.reveal({}) for key, secret in secrets.items()}
    assert revealed == {
        "url": "https://example.org",
        "headers.file": "from-file",
        "headers.credential": "from-credential",
        "headers.env": "from-environment",
    }


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\n", id="an empty line"),
        pytest.param(b"\xff\xfe", id="not UTF-8"),
        pytest.param(b"x" * 70_000, id="too long"),
    ],
)
def test_secret_is_refused_when_its_file_holds_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "secret").write_bytes(content)

    with pytest.raises(ConfigError, match="secret"):
        Secret(str(tmp_path / "secret"), "file").reveal()


@pytest.fixture
def installed_credential(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Secret:
    monkeypatch.setattr("notbefore.config.secret.INSTALLED", str(tmp_path))
    (tmp_path / "x").write_text("installed", encoding="utf-8")
    return Secret("x", "credential")


def test_credential_is_read_from_the_installation_without_systemd(
    installed_credential: Secret,
) -> None:
    assert installed_credential.reveal({}) == "installed"


def test_credential_is_read_only_from_the_directory_of_systemd(
    tmp_path: Path, installed_credential: Secret
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environment = {"CREDENTIALS_DIRECTORY": str(elsewhere)}

    with pytest.raises(ConfigError, match=r"file is missing in .*elsewhere$"):
        installed_credential.reveal(environment)


def test_secret_is_not_printed() -> None:
    secret = Secret("hunter2")

    assert "hunter2" not in f"{secret} {secret!r} {[secret]}"


def test_secrets_are_equal_when_their_texts_are() -> None:
    secret = Secret("hunter2")

    assert secret == Secret("hunter2")
    assert secret != Secret("hunter3")
    assert len({secret, Secret("hunter2")}) == 1


def test_secret_reveals_its_text() -> None:
    assert Secret("hunter2").reveal(os.environ) == "hunter2"


# ---- redaction

ALERTMANAGER = SinkConfig(
    alertmanager=Alertmanager(
        urls=("http://am",), username="ops", password=Secret("topsecret&word")
    )
)


@pytest.mark.parametrize(
    "form",
    [
        pytest.param("topsecret&word", id="plain"),
        pytest.param("topsecret%26word", id="percent coded"),
        pytest.param("topsecret&amp;word", id="HTML"),
        pytest.param("b3BzOnRvcHNlY3JldCZ3b3Jk", id="basic authentication"),
        pytest.param("AG9wcwB0b3BzZWNyZXQmd29yZA==", id="AUTH PLAIN of SMTP"),
    ],
)
def test_password_is_hidden_in_each_form_that_is_sent(form: str) -> None:
    redact = Redactor(known_secrets(ALERTMANAGER.settings))

    assert redact(f"got Authorization: Basic {form}!") == "got Authorization: Basic ***!"


CUTS = pytest.mark.parametrize(
    "cut",
    [
        pytest.param(slice(0, 20), id="beginning"),
        pytest.param(slice(5, 30), id="middle"),
        pytest.param(slice(-9, None), id="end"),
    ],
)


@CUTS
def test_piece_of_a_secret_is_hidden(cut: slice) -> None:
    secret = "xoxb-4839204-kJ83hdK29dmZpQ71sLwB"

    text = Redactor([secret])(f"400: the token {secret[cut]} ...")

    assert text == "400: the token *** ..."


@CUTS
def test_piece_of_a_secret_in_an_address_is_hidden(cut: slice) -> None:
    url = "https://hooks.example.org/services/T000/B000/kJ83hdK29dmZpQ71sLwB"
    secret = url[-20:]

    text = Redactor([url])(f"hooks.example.org: at {secret[cut]}")

    assert text == "hooks.example.org: at ***"


SECRETS = ("abcd", "s3cret-\N{SNOWMAN}>?", "canary/7f3a+9b2c~", "\xff\xfe\xfb\xef\xbf" * 3)


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("write", [str.lower, str.upper])
def test_secret_in_hex_is_hidden(secret: str, write: Callable[[str], str]) -> None:
    octets = write(secret.encode().hex())

    text = Redactor([secret])(f"400: got <{octets}>")

    assert text == "400: got <***>"


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("before", ["", "a", "ab", "abc"])
@pytest.mark.parametrize("after", ["", "x", "xy"])
@pytest.mark.parametrize("encode", [b64encode, urlsafe_b64encode, encodebytes])
def test_secret_in_base64_is_hidden_at_each_offset(
    secret: str,
    before: str,
    after: str,
    encode: Callable[[bytes], bytes],
) -> None:
    encoded = encode(f"{before}{secret}{after}".encode()).decode().strip()

    text = Redactor([secret])(encoded)

    remaining = text.replace("***", "").replace("=", "")
    assert "***" in text
    # these letters contain the other text, and a few bits of the secret
    assert len(remaining) <= 2 + 2 * (len(before) + len(after))


def test_secret_within_an_address_is_hidden_in_base64() -> None:
    url = "https://hooks.example.org/services/T000/B000/canary-7f3a9b2c"
    echoed = b64encode(f'{{"url": "{url}"}}'.encode()).decode()

    text = Redactor([url])(f"500: {echoed}")

    assert b64encode(b"canary-7f3a9b2c").decode()[:8] not in text
    for before in (b"", b"x", b"xx"):  # base64 writes a text in three ways, by its offset
        middle = b64encode(before + b"canary-7f3a9b2c").decode()[4:-4]
        assert middle not in text


def test_identifier_is_not_taken_for_a_secret_in_hex() -> None:
    text = "delivery 0f8fad5b-d9cb-469f-a165-70867728950e of canary-vm"

    assert Redactor(["hunter2-correct-horse"])(text) == text


@pytest.mark.parametrize(
    ("secret", "text"),
    [
        (
            "https://hooks.slack.com/services/T000/B000/abcdefgh",
            'POST /services/T000/B000/abcdefgh HTTP/1.1" 200',
        ),
        ("https://hooks.slack.com/services/T000/B000/abcdefgh", "token abcdefgh"),
        ("mailtos://me:pass%20word@mail.example.org", "AUTH PLAIN AG1lAHBhc3Mgd29yZA=="),
        ("mailtos://me:pass%20word@mail.example.org", "password: 'pass word'"),
        ("tgram://123456:topsecret/chatid", "https://api.telegram.org/bot123456:topsecret/x"),
        ("pagerduty://integrationkey@apikey99/", "key integrationkey, apikey99"),
        ("mailtos://me:topsecret[@host", "failed: mailtos://me:topsecret[@host, topsecret["),
        (
            "Endpoint=sb://x.servicebus.windows.net/;SharedAccessKeyName=root;SharedAccessKey=topsecret=;EntityPath=h",
            "SharedAccessKey=topsecret=",
        ),
        ("https://x.example.org/h?sig=a%2Fb%2Bcd%3D%3D", "sig was a/b+cd=="),
        # it only looks like a connection string
        ("a password;topsecret", "it was a password;topsecret"),
        # it only looks like an address
        ("pw://topsecret", "it was pw://topsecret"),
        # an address is no connection string
        ("https://x.example.org/topsecret;v=1", "no such page: /topsecret;v=1"),
        ("https://x.example.org/h?a=1;sig=topsecret", "no such page: /h?a=1;sig=topsecret"),
        ("mailtos://me:top;secret@mail.example.org", "AUTH PLAIN AG1lAHRvcDtzZWNyZXQ="),
        # the value of a header, also without its scheme
        ("Bearer topsecret-token", "401: topsecret-token is not known"),
        ("Basic bWU6dG9wc2VjcmV0", "401: bWU6dG9wc2VjcmV0 is not known, nor topsecret of me"),
        ('quo"te\\secret', '{"token":"quo\\"te\\\\secret"}'),
        ("caf\u00e9-secret", "caf\\u00e9-secret and caf%C3%A9-secret"),
    ],
)
def test_secret_is_hidden_in_each_form_that_is_written(secret: str, text: str) -> None:
    redacted = Redactor([secret])(text)

    pieces = [
        "abcdefgh",
        "topsecret",
        "AG1l",
        "pass word",
        "integrationkey",
        "apikey99",
        "b+cd",
        "te\\",
        "caf",
    ]
    assert "***" in redacted
    assert [piece for piece in pieces if piece in redacted] == []


ECHOED = "https://hooks.example.org/services/T000/B/kJ83hd+K29 dmZ<pQ>71s+Lw'B\u00e9&end"
PERCENT_CODED = quote(ECHOED, safe="")
ECHOES = {
    "slashes escaped, as by PHP": ECHOED.replace("/", r"\/"),
    "spaces as plus": ECHOED.replace(" ", "+"),
    "percent codes in lower case": re.sub("%..", lambda code: code[0].lower(), PERCENT_CODED),
    "percent coded in lower case": PERCENT_CODED.lower(),
    "percent coded twice": quote(PERCENT_CODED, safe=""),
    "form coded": quote_plus(ECHOED),
    "JSON with escaped brackets": (
        json.dumps(ECHOED).replace("<", r"\u003c").replace(">", r"\u003E")
    ),
    "JSON twice": json.dumps(json.dumps(ECHOED)),
    "HTML": escape(ECHOED).replace("+", "&#43;").replace("/", "&#x2F;"),
    "repr of bytes": repr(ECHOED.encode()),
    "repr": repr(ECHOED),
    "UTF-16": ECHOED.encode("utf-16-le").decode("latin-1"),
    "zero-width spaces": "\u200b".join(ECHOED),
    "all percent coded": "".join(f"%{octet:02x}" for octet in ECHOED.encode()),
    "escaped octets": "".join(f"\\x{octet:02X}" for octet in ECHOED.encode()),
    "escaped letters": "".join(f"\\u{ord(letter):04x}" for letter in ECHOED),
}


@pytest.mark.parametrize("echo", ECHOES.values(), ids=ECHOES.keys())
def test_address_is_hidden_however_a_receiver_quotes_it(echo: str) -> None:
    text = Redactor([ECHOED])(f"404: no such hook: {echo} (request 7)")

    secret = ECHOED.partition("services")[2].lower()
    pieces = [secret[start : start + 8] for start in range(len(secret) - 7)]
    readable = plain(text).lower()
    assert [piece for piece in pieces if piece in readable] == []
    assert "***" in text
    assert text.startswith("404: no such hook: ")


def test_redactor_without_secrets_changes_nothing() -> None:
    assert Redactor()("plain") == "plain"


@pytest.mark.parametrize(
    ("secrets", "text"),
    [
        pytest.param(["", "x"], "x marks the spot", id="short secrets"),
        pytest.param(
            ["https://x.example.org"],
            "see https://y.example.org",
            id="an address without a secret",
        ),
    ],
)
def test_text_without_secrets_is_unchanged(secrets: list[str], text: str) -> None:
    assert Redactor(secrets)(text) == text
