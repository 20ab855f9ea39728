"""Sinks, routes and secrets in the configuration: what is taken, what is refused and how, and what
is never shown.
"""

import json
import os
import re
from base64 import b64encode, encodebytes, urlsafe_b64encode
from collections.abc import Callable
from html import escape
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest

from notbefore.config.load import examine, load, warnings
from notbefore.config.secret import Secret, secrets_in
from notbefore.config.sinks import Alertmanager, SinkConfig, Webhook
from notbefore.courier.orders import Orders, seal, unseal
from notbefore.errors import ConfigError
from notbefore.net.redact import Redactor, known_secrets, plain


@pytest.mark.parametrize(
    ("missing", "text", "extra"),
    [
        ("apprise", "sinks: {a: {apprise: {url: x}}}", "apprise"),
        ("opentelemetry.exporter.otlp.proto.http", "otlp: {}", "otlp"),
        (
            "opentelemetry.exporter.otlp.proto.grpc",
            "sinks: {rec: {otlp_logs: {protocol: grpc}}}",
            "otlp-grpc",
        ),
    ],
)
def test_a_library_that_is_missing_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, text: str, extra: str
) -> None:
    config = tmp_path / "notbefore.yaml"
    config.write_text(text, encoding="utf-8")
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == missing else object()
    )
    with pytest.raises(ConfigError, match=rf"pip install 'azure-notbefore\[{extra}\]'"):
        load(config, {}, {})


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="its access lists are another matter")
def test_a_configuration_that_everybody_can_write_is_warned_of(tmp_path: Path) -> None:
    path, web = tmp_path / "notbefore.yaml", tmp_path / "web.yml"
    web.write_text("", encoding="utf-8")
    path.write_text(f"server: {{web_config_file: {web}}}", encoding="utf-8")
    config, places, _ = examine(path, {}, {})
    assert warnings(config, places) == []
    path.chmod(0o646)
    web.chmod(0o622)
    found = [text for text in warnings(config, places) if "can be written by every user" in text]
    assert [text.rpartition("chmod o-w ")[2] for text in found] == [str(path), str(web)]


def test_a_courier_is_given_the_text_of_a_secret_or_its_file(tmp_path: Path) -> None:
    environment = {"CREDENTIALS_DIRECTORY": str(tmp_path), "KEY": "from-environment"}
    texts = {"file": "from-file", "credential": "from-credential", "env": environment["KEY"]}
    for source in ("file", "credential"):
        # as an editor on Windows may
        (tmp_path / source).write_text(texts[source], encoding="utf-8-sig")
    headers = {
        "file": Secret(str(tmp_path / "file"), "file"),
        "credential": Secret("credential", "credential"),
        "env": Secret("KEY", "env"),
    }
    sink = SinkConfig(webhook=Webhook(url=Secret("https://example.org"), headers=headers))
    given = unseal(seal(Orders({"hook": sink}), environment)).sinks["hook"].settings
    found = {key: secret.reveal({}) for key, secret in secrets_in(given).items()}
    assert found == {
        "url": "https://example.org",
        **{f"headers.{name}": text for name, text in texts.items()},
    }


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe", b"x" * 70_000])
def test_a_secret_s_file_that_holds_none_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "secret").write_bytes(content)
    with pytest.raises(ConfigError, match="secret"):
        Secret(str(tmp_path / "secret"), "file").reveal()


def test_a_credential_is_systemd_s_or_for_a_command_by_hand_the_installed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("notbefore.config.secret.INSTALLED", str(tmp_path))
    (tmp_path / "x").write_text("installed", encoding="utf-8")
    assert Secret("x", "credential").reveal({}) == "installed"
    with pytest.raises(ConfigError, match=r"elsewhere.x cannot be read: No such file"):
        Secret("x", "credential").reveal({"CREDENTIALS_DIRECTORY": str(tmp_path / "elsewhere")})


ALERTMANAGER = SinkConfig(
    alertmanager=Alertmanager(
        urls=("http://am",), username="ops", password=Secret("topsecret&word")
    )
)


@pytest.mark.parametrize(
    "form",
    [
        "topsecret&word",
        "topsecret%26word",
        "topsecret&amp;word",
        "b3BzOnRvcHNlY3JldCZ3b3Jk",
        "AG9wcwB0b3BzZWNyZXQmd29yZA==",
    ],
)
def test_every_form_in_which_a_password_is_sent_is_hidden(form: str) -> None:
    redact = Redactor(known_secrets(ALERTMANAGER))
    assert redact(f"got Authorization: Basic {form}!") == "got Authorization: Basic ***!"


@pytest.mark.parametrize("cut", [slice(0, 20), slice(5, 30), slice(-9, None)])
def test_a_piece_of_a_secret_is_hidden_where_somebody_cut_a_text_within_it(cut: slice) -> None:
    secret = "xoxb-4839204-kJ83hdK29dmZpQ71sLwB"
    assert Redactor([secret])(f"400: the token {secret[cut]} ...") == "400: the token *** ..."
    url = "https://hooks.example.org/services/T000/B000/kJ83hdK29dmZpQ71sLwB"
    assert Redactor([url])(f"hooks.example.org: at {url[-20:][cut]}") == "hooks.example.org: at ***"


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
def test_secret_in_base64_is_hidden_wherever_it_stands(
    secret: str, before: str, after: str, encode: Callable[[bytes], bytes]
) -> None:
    encoded = encode(f"{before}{secret}{after}".encode()).decode().strip()

    text = Redactor([secret])(encoded)

    assert "***" in text
    # what is left are letters that contain other text, and a few bits of the secret
    assert len(text.replace("***", "").replace("=", "")) <= 2 + 2 * (len(before) + len(after))


def test_secret_within_an_address_is_hidden_in_base64() -> None:
    url = "https://hooks.example.org/services/T000/B000/canary-7f3a9b2c"
    echoed = b64encode(f'{{"url": "{url}"}}'.encode()).decode()

    text = Redactor([url])(f"500: {echoed}")

    assert b64encode(b"canary-7f3a9b2c").decode()[:8] not in text
    for offset in range(3):
        assert b64encode(b"x" * offset + b"canary-7f3a9b2c").decode()[4:-4] not in text


def test_identifiers_are_not_taken_for_secrets_in_hex() -> None:
    text = "delivery 0f8fad5b-d9cb-469f-a165-70867728950e of canary-vm"

    assert Redactor(["hunter2-correct-horse"])(text) == text


def test_a_secret_never_prints() -> None:
    secret = Secret("hunter2")
    assert "hunter2" not in f"{secret} {secret!r} {[secret]}"
    assert secret == Secret("hunter2") != Secret("hunter3")
    assert len({secret, Secret("hunter2")}) == 1
    assert secret.reveal(os.environ) == "hunter2"


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
        (
            "a password;topsecret",
            "it was a password;topsecret",
        ),  # what only looks like a connection string,
        ("pw://topsecret", "it was pw://topsecret"),  # and like an address
        (
            "https://x.example.org/topsecret;v=1",
            "no such page: /topsecret;v=1",
        ),  # an address is no connection string
        ("https://x.example.org/h?a=1;sig=topsecret", "no such page: /h?a=1;sig=topsecret"),
        ("mailtos://me:top;secret@mail.example.org", "AUTH PLAIN AG1lAHRvcDtzZWNyZXQ="),
        (
            "Bearer topsecret-token",
            "401: topsecret-token is not known",
        ),  # a header's value: without its scheme as well
        ("Basic bWU6dG9wc2VjcmV0", "401: bWU6dG9wc2VjcmV0 is not known, nor topsecret of me"),
        ('quo"te\\secret', '{"token":"quo\\"te\\\\secret"}'),
        ("caf\u00e9-secret", "caf\\u00e9-secret and caf%C3%A9-secret"),
    ],
)
def test_a_secret_is_taken_out_in_all_the_forms_it_is_written_in(secret: str, text: str) -> None:
    left = Redactor([secret])(text)
    assert "***" in left
    for piece in (
        "abcdefgh",
        "topsecret",
        "AG1l",
        "pass word",
        "integrationkey",
        "apikey99",
        "b+cd",
        "te\\",
        "caf",
    ):
        assert piece not in left


ECHOED = "https://hooks.example.org/services/T000/B/kJ83hd+K29 dmZ<pQ>71s+Lw'B\u00e9&end"


@pytest.mark.parametrize(
    "echo",
    [
        lambda address: address.replace("/", r"\/"),  # as PHP's JSON does
        lambda address: address.replace(" ", "+"),
        lambda address: re.sub("%..", lambda found: found[0].lower(), quote(address, safe="")),
        lambda address: quote(address, safe="").lower(),
        lambda address: quote(quote(address, safe=""), safe=""),
        quote_plus,
        lambda address: json.dumps(address).replace("<", r"\u003c").replace(">", r"\u003E"),
        lambda address: json.dumps(json.dumps(address)),
        lambda address: escape(address).replace("+", "&#43;").replace("/", "&#x2F;"),
        lambda address: repr(address.encode()),
        repr,
        lambda address: address.encode("utf-16-le").decode("latin-1"),
        "\u200b".join,
        lambda address: "".join(f"%{octet:02x}" for octet in address.encode()),
        lambda address: "".join(f"\\x{octet:02X}" for octet in address.encode()),
        lambda address: "".join(f"\\u{ord(letter):04x}" for letter in address),
    ],
)
def test_a_receiver_that_quotes_the_address_in_its_own_way_shows_nothing_of_it(
    echo: Callable[[str], str],
) -> None:
    said = f"404: no such hook: {echo(ECHOED)} (request 7)"
    left = Redactor([ECHOED])(said)
    secret = ECHOED.partition("services")[2]
    assert not [
        secret[at : at + 8]
        for at in range(len(secret) - 8)
        if secret[at : at + 8].lower() in plain(left).lower()
    ], left
    assert "***" in left
    assert left.startswith("404: no such hook: ")


def test_without_secrets_nothing_is_taken_out() -> None:
    assert Redactor()("plain") == "plain"
    assert Redactor(["", "x"])("x marks the spot") == "x marks the spot"
    assert (
        Redactor(["https://x.example.org"])("see https://y.example.org")
        == "see https://y.example.org"
    )
