"""Access to the listener: TLS, client certificates, passwords and host names."""

import base64
import gc
import http.client
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import bcrypt
import pytest
import trustme
import yaml
from cryptography.hazmat.primitives import serialization

from notbefore.config.model import Server
from notbefore.core.record import json_line
from notbefore.errors import ConfigError
from notbefore.web import channel as channels
from notbefore.web.access import Access, WebConfig
from notbefore.web.app import CheckResult
from notbefore.web.server import HttpServer
from support.agent import PATIENCE, eventually, run
from support.needs import needs
from support.served_view import (
    METRICS,
    NOTHING_PENDING,
    REQUEST,
    StubView,
    ask,
    connected,
    dripping,
    read_all,
    serving,
)

HASHES = {
    "prometheus": bcrypt.hashpw(b"correct horse", bcrypt.gensalt(4)).decode(),
    "browser": bcrypt.hashpw("größer".encode(), bcrypt.gensalt(6)).decode(),
}
DEFAULTS: dict[str, str] = {}


class Place:
    """A directory with certificates and a web configuration."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.file = directory / "web.yml"
        self.server_ca = trustme.CA()
        self.client_ca = trustme.CA()
        self.certify("localhost", "127.0.0.1")
        self.server_ca.cert_pem.write_to_path(directory / "ca.pem")
        self.client_ca.cert_pem.write_to_path(directory / "clients.pem")
        client = self.client_ca.issue_cert("scraper")
        client.private_key_and_cert_chain_pem.write_to_path(directory / "client.pem")
        self._write_encrypted_key()

    def _write_encrypted_key(self) -> None:
        key = serialization.load_pem_private_key((self.directory / "key.pem").read_bytes(), None)
        encrypted = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"not a password of a user"),
        )
        (self.directory / "encrypted.pem").write_bytes(encrypted)

    def certify(self, *names: str) -> None:
        """Give the server a new certificate for these names."""
        certificate = self.server_ca.issue_cert(*names)
        self._replace("cert.pem", certificate.cert_chain_pems[0].bytes())
        self._replace("key.pem", certificate.private_key_pem.bytes())

    def _replace(self, name: str, content: bytes) -> None:
        new = self.directory / f"{name}.new"
        new.write_bytes(content)
        new.replace(self.directory / name)

    def write(
        self,
        *,
        users: dict[str, str] | None = None,
        tls: dict[str, Any] | None = DEFAULTS,
    ) -> str:
        """Write the web configuration; return its path."""
        values: dict[str, Any] = {}
        if tls is not None:
            values["tls_server_config"] = {"cert_file": "cert.pem", "key_file": "key.pem", **tls}
        if users:
            values["basic_auth_users"] = users
        self._replace(self.file.name, yaml.safe_dump(values).encode())
        return str(self.file)

    def client(self, *, certificate: bool = False) -> ssl.SSLContext:
        """Return the settings of a client that trusts the server."""
        context = ssl.create_default_context()
        self.server_ca.configure_trust(context)
        if certificate:
            context.load_cert_chain(self.directory / "client.pem")
        return context


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("web"))


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


GOOD = basic("prometheus", "correct horse")
BROWSER = basic("browser", "größer")
WRONG = basic("prometheus", "wrong")


def curl(server: HttpServer, path: str, *words: str) -> subprocess.CompletedProcess[str]:
    needs("curl")
    return run("curl", "-sS", "--noproxy", "*", "--max-time", "20", *words, server.url + path)


@pytest.fixture
def with_passwords(place: Place) -> Iterator[HttpServer]:
    """A listener with TLS and passwords."""
    with serving(place.write(users=HASHES)) as server:
        yield server


def trust(place: Place) -> tuple[str, str]:
    """Return the option with which curl trusts the server."""
    return "--cacert", str(place.directory / "ca.pem")


def test_curl_gets_metrics_over_tls_with_a_password(
    place: Place, with_passwords: HttpServer
) -> None:
    result = curl(with_passwords, "/metrics", *trust(place), "-u", "prometheus:correct horse")

    assert with_passwords.url.startswith("https://")
    assert result.stdout.encode() == METRICS
    assert result.stderr == ""


def test_curl_without_a_password_gets_an_error(place: Place, with_passwords: HttpServer) -> None:
    result = curl(with_passwords, "/metrics", *trust(place))

    assert result.stdout == '{"error":"a user and a password are required"}'


def test_curl_does_not_trust_an_unknown_authority(with_passwords: HttpServer) -> None:
    result = curl(with_passwords, "/metrics")

    assert "SSL certificate problem" in result.stderr


@pytest.mark.parametrize(("version", "exit_code"), [("1.1", 35), ("1.2", 0), ("1.3", 0)])
def test_listener_accepts_tls_1_2_and_later(
    place: Place, with_passwords: HttpServer, version: str, exit_code: int
) -> None:
    versions = (f"--tlsv{version}", "--tls-max", version)

    result = curl(with_passwords, "/healthz", *trust(place), *versions)

    assert result.returncode == exit_code, result.stderr


@pytest.fixture
def with_client_certificates(place: Place) -> Iterator[HttpServer]:
    """A listener that requires a certificate of the clients' authority."""
    tls = {"client_ca_file": "clients.pem", "client_auth_type": "RequireAndVerifyClientCert"}
    with serving(place.write(tls=tls)) as server:
        yield server


def test_client_with_a_certificate_of_the_authority_is_served(
    place: Place, with_client_certificates: HttpServer
) -> None:
    _, _, body = ask(with_client_certificates, "/metrics", place.client(certificate=True))

    assert body == METRICS


def test_client_without_a_certificate_is_refused(
    place: Place, with_client_certificates: HttpServer
) -> None:
    with pytest.raises((ssl.SSLError, ConnectionError)):
        ask(with_client_certificates, "/healthz", place.client())


def test_client_with_a_certificate_of_another_authority_is_refused(
    place: Place, with_client_certificates: HttpServer
) -> None:
    stranger = place.client()
    stranger.load_cert_chain(place.directory / "cert.pem", place.directory / "key.pem")

    with pytest.raises((ssl.SSLError, ConnectionError)):
        ask(with_client_certificates, "/healthz", stranger)


LONG = os.urandom(12_000_000)  # more than the kernel takes for a client that does not read


@pytest.fixture
def _slow_clients_have_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, a client may send nothing for seconds, and read nothing for longer."""
    monkeypatch.setattr(channels, "REQUEST_PATIENCE", PATIENCE)
    monkeypatch.setattr(channels, "ANSWER_PATIENCE", PATIENCE)


@pytest.mark.usefixtures("_slow_clients_have_time")
def test_slow_reader_gets_each_answer_whole_over_tls(place: Place) -> None:
    with serving(place.write(), view=StubView(LONG)) as server, ExitStack() as stack:
        tls = connected_over_tls(place.client(), server, stack)

        tls.sendall(REQUEST % (b"metrics", b""))  # in one record
        for byte in REQUEST % (b"api/v1/events", b"Connection: close\r\n"):
            tls.sendall(bytes([byte]))
        answers = read_all(tls)  # raises at an end without a close of TLS

    assert answers.count(b"HTTP/1.1 200 OK") == 2
    assert LONG in answers
    assert answers.endswith(json_line(NOTHING_PENDING))


def test_slow_reader_over_tls_does_not_delay_others(place: Place) -> None:
    with serving(place.write(), view=StubView(LONG)) as server, ExitStack() as stack:
        tls = connected_over_tls(place.client(), server, stack)
        tls.sendall(REQUEST % (b"metrics", b""))

        status, _, _ = ask(server, "/healthz", place.client())

    assert status == 200


def test_unfinished_handshake_is_closed_at_its_timeout(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "REQUEST_PATIENCE", 0.5)
    with (
        serving(place.write()) as server,
        socket.create_connection(server.address, timeout=PATIENCE) as client,
    ):
        for byte in client_hello(place):
            try:
                client.sendall(bytes([byte]))
            except OSError:
                return  # the server has closed the connection
            time.sleep(0.05)  # the client is slow
        pytest.fail("the server waited for the whole handshake")


def client_hello(place: Place) -> bytes:
    """Return the first bytes that a client sends."""
    sent = ssl.MemoryBIO()
    client = place.client().wrap_bio(ssl.MemoryBIO(), sent, server_hostname="localhost")
    with suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return sent.read()


def connected_over_tls(
    context: ssl.SSLContext, server: HttpServer, stack: ExitStack
) -> ssl.SSLSocket:
    """Return a connection that has finished its handshake."""
    raw = stack.enter_context(socket.create_connection(server.address, timeout=PATIENCE))
    tls = context.wrap_socket(raw, server_hostname="localhost", suppress_ragged_eofs=False)
    return stack.enter_context(tls)


@pytest.mark.alone
@pytest.mark.parametrize("has_begun", [False, True], ids=["silent", "begun"])
def test_thousand_unfinished_handshakes_do_not_delay_a_scrape(
    place: Place, *, has_begun: bool
) -> None:
    hello = client_hello(place) if has_begun else b""
    scraper = place.client()
    with serving(place.write()) as server, ExitStack() as stack:
        for number, client in enumerate(connected(server, stack, 1000)):
            beginning = hello
            if number % 4 == 0:
                beginning = hello[:100]
            with suppress(OSError):  # the server has closed it for a newer connection
                client.sendall(beginning)
        slow_clients = [connected_over_tls(scraper, server, stack) for _ in range(50)]
        with dripping(slow_clients):
            for _ in range(10):
                started = time.monotonic()
                _, _, body = ask(server, "/metrics", scraper)

                assert body == METRICS
                assert time.monotonic() - started < 1.0

            sockets = [tls for tls in gc.get_objects() if isinstance(tls, ssl.SSLSocket)]
            assert len(sockets) < 300  # each needs 45 KiB or more


def served_names(server: HttpServer, place: Place) -> list[str]:
    """Return the names in the certificate that the server presents."""
    context = place.client()
    context.check_hostname = False
    with (
        socket.create_connection(server.address, timeout=PATIENCE) as raw,
        context.wrap_socket(raw) as tls,
    ):
        certificate: Any = tls.getpeercert()
        return [name for kind, name in certificate["subjectAltName"] if kind == "DNS"]


@pytest.fixture
def renewable(tmp_path: Path) -> Place:
    """A place of the test's own, whose certificate it may replace."""
    return Place(tmp_path)


def test_renewed_certificate_is_used_for_the_next_handshake(renewable: Place) -> None:
    with serving(renewable.write()) as server:
        assert served_names(server, renewable) == ["localhost"]

        # some tools remove the old certificate some time before they write the new one
        (renewable.directory / "cert.pem").unlink()

        assert served_names(server, renewable) == ["localhost"]

        renewable.certify("renewed.example.org")

        assert served_names(server, renewable) == ["renewed.example.org"]


def test_renewed_certificate_stays_when_the_web_config_is_unreadable(renewable: Place) -> None:
    with serving(renewable.write()) as server:
        renewable.certify("renewed.example.org")
        assert served_names(server, renewable) == ["renewed.example.org"]

        renewable.file.write_text("{", encoding="utf-8")

        assert served_names(server, renewable) == ["renewed.example.org"]


def test_connection_outlives_the_certificate_of_its_handshake(renewable: Place) -> None:
    with serving(renewable.write()) as server:
        connection = http.client.HTTPSConnection(
            "127.0.0.1", server.address[1], context=renewable.client(), timeout=PATIENCE
        )
        with closing(connection):
            connection.request("GET", "/metrics")
            connection.getresponse().read()
            renewable.certify("renewed.example.org")
            assert served_names(server, renewable) == ["renewed.example.org"]

            connection.request("GET", "/metrics")

            assert connection.getresponse().read() == METRICS


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param("basic_auth_user: {}", "did you mean 'basic_auth_users'?", id="wrong key"),
        pytest.param("", "remove passwords", id="without passwords"),
        pytest.param("{", "not YAML", id="not YAML"),
        pytest.param("a: !!bool x", "tags (!name) are not supported", id="tag"),
    ],
)
def test_new_web_config_that_is_wrong_is_refused_and_logged_once(
    place: Place, caplog: pytest.LogCaptureFixture, text: str, reason: str
) -> None:
    path = place.write(users=HASHES, tls=None)
    with serving(path) as server:
        ask(server, "/metrics", Authorization=GOOD)

        Path(path).write_text(text, encoding="utf-8")
        without_password, _, _ = ask(server, "/metrics")
        with_password, _, _ = ask(server, "/metrics", Authorization=GOOD)

    assert without_password == 401
    assert with_password == 200
    assert reason in caplog.text
    assert caplog.text.count("the old one stays") == 1


def test_changed_password_replaces_the_old_one(place: Place) -> None:
    users = {"prometheus": HASHES["prometheus"]}
    with serving(place.write(users=users, tls=None)) as server:
        assert ask(server, "/metrics", Authorization=GOOD)[0] == 200

        new_users = {"prometheus": HASHES["browser"], "browser": HASHES["browser"]}
        place.write(users=new_users, tls=None)

        assert ask(server, "/metrics", Authorization=GOOD)[0] == 401
        assert ask(server, "/metrics", Authorization=BROWSER)[0] == 200


def test_tls_may_be_added_to_the_web_config(place: Place) -> None:
    with serving(place.write(users=HASHES, tls=None)) as server:
        assert ask(server, "/metrics", Authorization=BROWSER)[0] == 200

        place.write(users=HASHES)

        assert ask(server, "/metrics", place.client(), Authorization=BROWSER)[0] == 200


def test_web_config_is_applied_once_its_certificate_exists(renewable: Place) -> None:
    old_client = renewable.client()
    old_client.maximum_version = ssl.TLSVersion.TLSv1_2
    with serving(renewable.write()) as server:
        renewable.write(tls={"cert_file": "late.pem", "min_version": "TLS13"})

        assert ask(server, "/metrics", old_client)[0] == 200

        shutil.copy(renewable.directory / "cert.pem", renewable.directory / "late.pem")

        assert ask(server, "/metrics", renewable.client())[0] == 200
        with pytest.raises((ssl.SSLError, ConnectionError)):
            ask(server, "/metrics", old_client)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            "tls_server_config:\n  cert_files: x",
            ":2: tls_server_config.cert_files: there is no such key here: did you mean"
            " 'cert_file'?",
            id="unknown key",
        ),
        pytest.param(
            "tls_server_config: {cert_file: cert.pem, key_file: none.pem}",
            "tls_server_config.key_file: ",
            id="missing file",
        ),
        pytest.param(
            "tls_server_config: {cert_file: cert.pem, key_file: client.pem}",
            "mismatch",
            id="key of another certificate",
        ),
        pytest.param(
            "tls_server_config: {cert_file: c, key_file: k, client_ca_file: x}",
            "need each other",
            id="authority without a type",
        ),
        pytest.param(
            "tls_server_config: {cert_file: cert.pem, key_file: key.pem, client_ca_file: key.pem,"
            " client_auth_type: RequireAndVerifyClientCert}",
            "_config.client_ca_file: ",
            id="key as authority",
        ),
        pytest.param(
            "tls_server_config: {cert_file: cert.pem, key_file: encrypted.pem}",
            "the key is encrypted",
            id="encrypted key",
        ),
        pytest.param(
            'tls_server_config: {cert_file: "c\\0", key_file: key.pem}',
            "tls_server_config.cert_file",
            id="NUL in a path",
        ),
        pytest.param(
            "basic_auth_users: {bob: hunter2}",
            "basic_auth_users.bob: expected a bcrypt hash",
            id="password",
        ),
        pytest.param(
            "basic_auth_users: {bob: $2b$10$" + "." * 21 + "z" + "." * 31 + "}",
            "basic_auth_users.bob: expected a bcrypt",
            id="impossible hash",
        ),
        pytest.param(
            "basic_auth_users: {bob:hunter2}",
            "basic_auth_users.bob: a blank is missing",
            id="no blank after the user",
        ),
        pytest.param(
            "basic_auth_users: {'bob:hunter2': x}",
            "basic_auth_users.bob: expected a bcrypt hash",
            id="password after a colon in the key",
        ),
        pytest.param(
            "basic_auth_users: {bob=hunter2: x}",
            "basic_auth_users.bob: expected a bcrypt hash",
            id="password after an equals sign in the key",
        ),
        pytest.param(
            "basic_auth_users: {'bob:hunter2': $2b$10$" + "." * 22 + "a" * 31 + "}",
            "'bob' begins no valid",
            id="colon in a user",
        ),
        pytest.param(
            "basic_auth_users: {bob: $2y$31$" + "a" * 53 + "}", "cost 4 to 14", id="cost of a hash"
        ),
    ],
)
def test_mistake_in_the_web_config_is_named_with_its_place(
    place: Place, text: str, expected: str
) -> None:
    path = place.directory / "wrong.yml"
    path.write_text(text + "\n", encoding="utf-8")

    with pytest.raises(ConfigError) as caught:
        Access(Server(web_config_file=str(path)))

    error = str(caught.value)
    without_columns = re.sub(r"(yml:\d+):\d+", r"\1", error)
    assert error.startswith(str(path))
    assert expected in without_columns
    assert "hunter2" not in error


def test_missing_bcrypt_is_named_with_the_extra_to_install(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bcrypt", None)

    with pytest.raises(ConfigError, match=r"pip install 'azure-notbefore\[web\]'"):
        Access(Server(web_config_file=place.write(users=HASHES)))


def test_bcrypt_is_not_needed_without_passwords(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bcrypt", None)

    Access(Server(web_config_file=place.write()))


@pytest.fixture
def access(place: Place) -> Access:
    """Access with passwords and without TLS."""
    path = place.write(users=HASHES, tls=None)
    return Access(Server(web_config_file=path))


@pytest.fixture
def without_tls(access: Access) -> Iterator[HttpServer]:
    """A listener with this access."""
    server = HttpServer(Server(listen="127.0.0.1:0"), StubView().app, access)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("user", "password"), [("prometheus", "correct horse"), ("browser", "größer")]
)
def test_right_password_is_accepted(
    without_tls: HttpServer, access: Access, user: str, password: str
) -> None:
    status, headers, body = ask(without_tls, "/api/v1/events", Authorization=basic(user, password))

    assert status == 200
    assert body == json_line(NOTHING_PENDING)
    assert "WWW-Authenticate" not in headers
    assert access.auth_failures == 0


def test_any_host_name_is_accepted_with_a_password(without_tls: HttpServer) -> None:
    status, _, _ = ask(without_tls, "/metrics", Host="fleet.example.org", Authorization=GOOD)

    assert status == 200


WRONG_LOGINS = {
    "another-user": basic("prometheus", "größer"),
    "unknown-user": basic("nobody", "correct horse"),
    "long-password": basic("prometheus", "correct horse" + "x" * 100),
    "nul": basic("prometheus", "\0"),
    "not-base64": "Basic !!!",
    "not-utf-8": "Basic " + base64.b64encode(b"\xff:x").decode(),
    "no-colon": "Basic " + base64.b64encode(b"prometheus").decode(),
    "bearer": "Bearer correct horse",
}


@pytest.mark.parametrize("login", WRONG_LOGINS)
def test_wrong_login_is_refused_and_counted(
    without_tls: HttpServer, access: Access, login: str
) -> None:
    status, headers, body = ask(without_tls, "/api/v1/events", Authorization=WRONG_LOGINS[login])

    assert status == 401
    assert "WWW-Authenticate" in headers
    assert body != json_line(NOTHING_PENDING)
    assert access.auth_failures == 1


def test_request_without_a_login_is_refused_and_not_counted(
    without_tls: HttpServer, access: Access
) -> None:
    status, headers, _ = ask(without_tls, "/api/v1/events")

    assert status == 401
    assert "WWW-Authenticate" in headers
    assert access.auth_failures == 0  # a browser asks without a password first


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_probe_without_a_password_gets_no_reasons(place: Place, path: str) -> None:
    view = StubView()
    view.verdict = CheckResult(ok=True, reasons=("the state is in /secret",))
    with serving(place.write(users=HASHES, tls=None), view=view) as server:
        status, _, body = ask(server, path)

    assert status == 200
    assert body == b'{"status":"ok","reasons":[]}'


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_probe_with_a_password_gets_the_reasons(place: Place, path: str) -> None:
    view = StubView()
    view.verdict = CheckResult(ok=True, reasons=("the state is in /secret",))
    with serving(place.write(users=HASHES, tls=None), view=view) as server:
        _, _, body = ask(server, path, Authorization=GOOD)

    assert json.loads(body)["reasons"] == ["the state is in /secret"]


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_probe_with_a_wrong_password_is_refused(without_tls: HttpServer, path: str) -> None:
    status, _, _ = ask(without_tls, path, Authorization=WRONG)

    assert status == 401


@contextmanager
def slow_comparison(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Compare the password `wrong` until the end; the event is set when a comparison begins."""
    comparing = threading.Event()
    release = threading.Event()
    password_fits = WebConfig.password_fits

    def compare(config: WebConfig, user: str, password: bytes) -> bool:
        if password == b"wrong":
            comparing.set()
            release.wait(PATIENCE)
        return password_fits(config, user, password)

    monkeypatch.setattr(WebConfig, "password_fits", compare)
    try:
        yield comparing
    finally:
        release.set()


def test_wrong_passwords_do_not_delay_clients_with_a_known_password(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        serving(place.write(users=HASHES, tls=None)) as server,
        ThreadPoolExecutor(8) as pool,
        slow_comparison(monkeypatch) as comparing,
    ):
        assert ask(server, "/metrics", Authorization=GOOD)[0] == 200  # now it is known

        for _ in range(8):
            pool.submit(ask, server, "/metrics", Authorization=WRONG)
        assert comparing.wait(PATIENCE)

        for path in ("/metrics", "/", "/api/v1/events"):
            assert ask(server, path, Authorization=GOOD)[0] == 200
        assert ask(server, "/healthz")[0] == 200
        assert ask(server, "/metrics", Authorization="Basic !!!")[0] == 401


def test_passwords_are_compared_one_at_a_time(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        serving(place.write(users=HASHES, tls=None)) as server,
        ThreadPoolExecutor(8) as pool,
        slow_comparison(monkeypatch),
    ):
        requests = [pool.submit(ask, server, "/metrics", Authorization=WRONG) for _ in range(8)]

        eventually(lambda: sum(request.done() for request in requests) == 7)

        for request in requests:
            if request.done():
                status, headers, _ = request.result()
                assert status == 429
                assert headers["Retry-After"] == "1"


@pytest.mark.parametrize("user", ["browser", "nobody"])
def test_unknown_user_costs_as_much_as_a_wrong_password(
    monkeypatch: pytest.MonkeyPatch, user: str
) -> None:
    check = Mock(side_effect=bcrypt.checkpw)
    monkeypatch.setattr(bcrypt, "checkpw", check)
    config = WebConfig(basic_auth_users=HASHES)

    assert not config.password_fits(user, b"wrong")

    (call,) = check.call_args_list
    _, hashed = call.args
    assert hashed.startswith(b"$2b$06$")  # the most expensive of the users


@pytest.fixture(scope="module")
def with_allowed_hosts() -> Iterator[HttpServer]:
    with serving(allowed_hosts=("vm.example.org", "*.internal")) as server:
        yield server


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:10169",
        "10.0.0.4",
        "[::1]:10169",
        "localhost:10169",
        "LOCALHOST.",
        socket.gethostname(),
        "vm.example.org:10169",
        "a.b.internal",
    ],
)
def test_own_and_allowed_host_names_are_served(with_allowed_hosts: HttpServer, host: str) -> None:
    assert ask(with_allowed_hosts, "/api/v1/events", Host=host)[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        "internal",
        "evil.example.com",
        "127.0.0.1.evil.example.com",
        "evil.example.com:127.0.0.1",
        "x-internal",
    ],
)
def test_foreign_host_name_is_refused(with_allowed_hosts: HttpServer, host: str) -> None:
    status, _, body = ask(with_allowed_hosts, "/api/v1/events", Host=host)

    assert status == 421
    assert b"server.allowed_hosts" in body


PUBLIC = pytest.mark.parametrize("listen", [":0", "0.0.0.0:0"])


@PUBLIC
def test_public_listener_without_protection_is_refused(listen: str) -> None:
    with (
        pytest.raises(ConfigError, match=r"server\.web_config_file .* or server\.insecure: true"),
        serving(None, listen),
    ):
        pass


@PUBLIC
def test_public_listener_with_an_empty_web_config_is_refused(place: Place, listen: str) -> None:
    with pytest.raises(ConfigError), serving(place.write(tls=None), listen):
        pass


@PUBLIC
@pytest.mark.parametrize(
    ("users", "tls", "warning"),
    [
        (HASHES, None, "passwords are sent unencrypted"),
        (None, DEFAULTS, "can read the agent over TLS: add basic_auth_users"),
        (HASHES, DEFAULTS, ""),
    ],
    ids=["passwords", "tls", "tls-and-passwords"],
)
def test_public_listener_warns_of_what_is_missing(
    place: Place,
    caplog: pytest.LogCaptureFixture,
    *,
    listen: str,
    users: dict[str, str] | None,
    tls: dict[str, Any] | None,
    warning: str,
) -> None:
    context = None
    if tls is not None:
        context = place.client()

    with serving(place.write(users=users, tls=tls), listen) as server:
        assert ask(server, "/healthz", context)[0] == 200

    assert warning in caplog.text
    assert bool(warning) == bool(caplog.text)


@PUBLIC
def test_insecure_public_listener_warns(caplog: pytest.LogCaptureFixture, listen: str) -> None:
    with serving(None, listen, insecure=True) as server:
        assert ask(server, "/healthz")[0] == 200

    assert "everyone who reaches" in caplog.text
