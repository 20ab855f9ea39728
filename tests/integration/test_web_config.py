"""Access to the listener: TLS, client certificates, passwords and host names; curl, Python and a
thousand slow clients ask.
"""

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
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

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
from support.agent import eventually, run
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
TLS = "tls_server_config: {cert_file: cert.pem, key_file: key.pem, %s}"
DEFAULTS: dict[str, str] = {}


class Place:
    """A directory with certificates and a web configuration."""

    def __init__(self, at: Path) -> None:
        self.at = at
        self.file = at / "web.yml"
        self.server_ca = trustme.CA()
        self.client_ca = trustme.CA()
        self.certify()
        self.client_ca.cert_pem.write_to_path(at / "clients.pem")
        self.server_ca.cert_pem.write_to_path(at / "ca.pem")
        locked = serialization.load_pem_private_key(
            (at / "key.pem").read_bytes(), None
        ).private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"nobody types this"),
        )
        (at / "locked.pem").write_bytes(locked)
        client = self.client_ca.issue_cert("scraper")
        client.private_key_and_cert_chain_pem.write_to_path(at / "client.pem")

    def certify(self, *names: str) -> None:
        """A new certificate for the server."""
        cert = self.server_ca.issue_cert(*(names or ("localhost", "127.0.0.1")))
        for name, pem in (("cert.pem", cert.cert_chain_pems[0]), ("key.pem", cert.private_key_pem)):
            pem.write_to_path(self.at / f"{name}.new")
            (self.at / f"{name}.new").replace(self.at / name)

    def write(
        self,
        *,
        users: dict[str, str] | None = None,
        tls: dict[str, Any] | None = DEFAULTS,
        **more: Any,
    ) -> str:
        values = dict(more)
        if tls is not None:
            values["tls_server_config"] = {"cert_file": "cert.pem", "key_file": "key.pem", **tls}
        if users:
            values["basic_auth_users"] = users
        self.file.with_suffix(".new").write_text(yaml.safe_dump(values), encoding="utf-8")
        self.file.with_suffix(".new").replace(self.file)
        return str(self.file)

    def client(self, *, certificate: bool = False) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.server_ca.configure_trust(context)
        if certificate:
            context.load_cert_chain(self.at / "client.pem")
        return context


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("web"))


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


GOOD = basic("prometheus", "correct horse")
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
    return "--cacert", str(place.at / "ca.pem")


def test_curl_gets_metrics_over_tls_with_a_password(
    place: Place, with_passwords: HttpServer
) -> None:
    done = curl(with_passwords, "/metrics", *trust(place), "-u", "prometheus:correct horse")

    assert with_passwords.url.startswith("https://")
    assert done.stdout.encode() == METRICS
    assert done.stderr == ""


def test_curl_without_a_password_gets_an_error(place: Place, with_passwords: HttpServer) -> None:
    done = curl(with_passwords, "/metrics", *trust(place))

    assert done.stdout == '{"error":"a user and a password are required"}'


def test_curl_does_not_trust_an_unknown_authority(with_passwords: HttpServer) -> None:
    done = curl(with_passwords, "/metrics")

    assert "SSL certificate problem" in done.stderr


@pytest.mark.parametrize(("version", "exit_code"), [("1.1", 35), ("1.2", 0), ("1.3", 0)])
def test_listener_accepts_tls_1_2_and_later(
    place: Place, with_passwords: HttpServer, version: str, exit_code: int
) -> None:
    done = curl(with_passwords, "/healthz", *trust(place), f"--tlsv{version}", "--tls-max", version)

    assert done.returncode == exit_code, done.stderr


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
    stranger.load_cert_chain(place.at / "cert.pem", place.at / "key.pem")

    with pytest.raises((ssl.SSLError, ConnectionError)):
        ask(with_client_certificates, "/healthz", stranger)


LONG = os.urandom(12_000_000)  # more than the kernel takes for a client that does not read


def test_slow_reader_gets_a_long_answer_whole_over_tls(place: Place) -> None:
    with serving(place.write(), view=StubView(LONG)) as server, ExitStack() as stack:
        tls = shaken(place.client(), server, stack)
        # a request in one record, and one more byte by byte: each is answered, in order
        tls.sendall(REQUEST % (b"metrics", b""))
        for byte in REQUEST % (b"api/v1/events", b"Connection: close\r\n"):
            tls.sendall(bytes([byte]))

        assert ask(server, "/healthz", place.client())[0] == 200  # others do not wait for it

        answers = read_all(tls)  # raises at an end without a close of TLS

        assert answers.count(b"HTTP/1.1 200 OK") == 2
        assert LONG in answers
        assert answers.endswith(json_line(NOTHING_PENDING))


def test_unfinished_handshake_is_closed_at_its_timeout(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "REQUEST_PATIENCE", 0.5)
    with (
        serving(place.write()) as server,
        socket.create_connection(server.address, timeout=20) as client,
    ):
        for byte in hello(place):
            try:
                client.sendall(bytes([byte]))
            except OSError:
                return  # closed while it dripped
            time.sleep(0.05)  # the drip itself
        pytest.fail("it took every byte of a handshake that lasted many times as long as it may")


def hello(place: Place) -> bytes:
    """How a client begins."""
    sent = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        place.client().wrap_bio(ssl.MemoryBIO(), sent, server_hostname="localhost").do_handshake()
    return sent.read()


def shaken(context: ssl.SSLContext, server: HttpServer, stack: ExitStack) -> ssl.SSLSocket:
    """A connection that has shaken hands."""
    raw = stack.enter_context(socket.create_connection(server.address, timeout=20))
    tls = context.wrap_socket(raw, server_hostname="localhost", suppress_ragged_eofs=False)
    return stack.enter_context(tls)


@pytest.mark.alone
@pytest.mark.parametrize("begun", [False, True])
def test_thousand_unfinished_handshakes_do_not_delay_a_scrape(place: Place, begun: bool) -> None:
    begin = hello(place) if begun else b""
    scraper = place.client()
    with serving(place.write()) as server, ExitStack() as stack:
        for number, client in enumerate(connected(server, stack, 1000)):
            with suppress(OSError):  # it was closed for a newer one
                client.sendall(begin if number % 4 else begin[:100])
        with dripping([shaken(scraper, server, stack) for _ in range(50)]):
            for _ in range(10):
                asked = time.monotonic()
                assert ask(server, "/metrics", scraper)[2] == METRICS
                assert time.monotonic() - asked < 1.0

            # each holds 45 KiB or more
            assert sum(isinstance(one, ssl.SSLSocket) for one in gc.get_objects()) < 300


def served_name(server: HttpServer, place: Place) -> list[str]:
    with socket.create_connection(server.address, timeout=20) as raw:
        context = place.client()
        context.check_hostname = False
        with context.wrap_socket(raw) as tls:
            certificate: Any = tls.getpeercert()
            return [name for kind, name in certificate["subjectAltName"] if kind == "DNS"]


def test_renewed_certificate_is_used_for_the_next_handshake(place: Place) -> None:
    try:
        with serving(place.write()) as server:
            assert served_name(server, place) == ["localhost"]

            kept = http.client.HTTPSConnection(
                "127.0.0.1", server.address[1], context=place.client(), timeout=20
            )
            kept.request("GET", "/metrics")
            kept.getresponse().read()
            (place.at / "cert.pem").unlink()  # by a tool that does not replace it at once

            assert served_name(server, place) == ["localhost"]

            place.certify("renewed.example.org")
            assert served_name(server, place) == ["renewed.example.org"]

            kept.request("GET", "/metrics")  # what has shaken hands goes on
            assert kept.getresponse().read() == METRICS

            kept.close()
            place.file.write_text("{", encoding="utf-8")

            assert served_name(server, place) == ["renewed.example.org"]
    finally:
        place.certify()


def test_web_config_that_is_wrong_or_removes_passwords_is_not_applied(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    path = place.write(users={"prometheus": HASHES["prometheus"]}, tls=None)
    with serving(path) as server:
        assert ask(server, "/metrics", Authorization=GOOD)[0] == 200

        for text, why in (
            ("basic_auth_user: {}", "did you mean 'basic_auth_users'?"),
            ("", "remove passwords"),
            ("{", "not YAML"),
            ("a: !!bool x", "tags (!name) are not supported"),
        ):
            Path(path).write_text(text, encoding="utf-8")
            assert ask(server, "/metrics")[0] == 401
            assert ask(server, "/metrics", Authorization=GOOD)[0] == 200
            assert why in caplog.text
        assert caplog.text.count("the old one stays") == 4  # said once each, not with each request

        place.write(users={"prometheus": HASHES["browser"], "browser": HASHES["browser"]}, tls=None)
        assert ask(server, "/metrics", Authorization=GOOD)[0] == 401  # though it was right before
        assert ask(server, "/metrics", Authorization=basic("browser", "größer"))[0] == 200

        place.write(users={"browser": HASHES["browser"]})  # and TLS may be added
        assert (
            ask(server, "/metrics", place.client(), Authorization=basic("browser", "größer"))[0]
            == 200
        )


def test_web_config_is_applied_once_its_certificate_exists(
    place: Place,
) -> None:
    with serving(place.write()) as server:
        place.write(tls={"cert_file": "late.pem", "min_version": "TLS13"})
        old = place.client()
        old.maximum_version = ssl.TLSVersion.TLSv1_2

        assert ask(server, "/metrics", old)[0] == 200

        shutil.copy(place.at / "cert.pem", place.at / "late.pem")
        assert ask(server, "/metrics", place.client())[0] == 200
        with pytest.raises((ssl.SSLError, ConnectionError)):
            ask(server, "/metrics", old)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "tls_server_config:\n  cert_files: x",
            (
                ":2: tls_server_config.cert_files: there is no such key here: did you mean"
                " 'cert_file'?"
            ),
        ),
        (
            "tls_server_config: {cert_file: cert.pem, key_file: none.pem}",
            "tls_server_config.key_file: ",
        ),
        ("tls_server_config: {cert_file: cert.pem, key_file: client.pem}", "mismatch"),
        ("tls_server_config: {cert_file: c, key_file: k, client_ca_file: x}", "need each other"),
        (
            TLS % "client_ca_file: key.pem, client_auth_type: RequireAndVerifyClientCert",
            "_config.client_ca_file: ",
        ),
        ("tls_server_config: {cert_file: cert.pem, key_file: locked.pem}", "the key is encrypted"),
        (
            'tls_server_config: {cert_file: "c\\0", key_file: key.pem}',
            "tls_server_config.cert_file",
        ),
        ("basic_auth_users: {bob: hunter2}", "basic_auth_users.bob: expected a bcrypt hash"),
        (
            "basic_auth_users: {bob: $2b$10$" + "." * 21 + "z" + "." * 31 + "}",
            "basic_auth_users.bob: expected a bcrypt",
        ),
        ("basic_auth_users: {bob:hunter2}", "basic_auth_users.bob: a blank is missing"),
        ("basic_auth_users: {'bob:hunter2': x}", "basic_auth_users.bob: expected a bcrypt hash"),
        ("basic_auth_users: {bob=hunter2: x}", "basic_auth_users.bob: expected a bcrypt hash"),
        (
            "basic_auth_users: {'bob:hunter2': $2b$10$" + "." * 22 + "a" * 31 + "}",
            "'bob' begins no valid",
        ),
        ("basic_auth_users: {bob: $2y$31$" + "a" * 53 + "}", "cost 4 to 14"),
    ],
)
def test_mistake_in_the_web_config_is_named_with_its_place(
    place: Place, text: str, expected: str
) -> None:
    path = place.at / "wrong.yml"

    path.write_text(text + "\n", encoding="utf-8")

    with pytest.raises(ConfigError) as caught:
        Access(Server(web_config_file=str(path)))
    assert str(caught.value).startswith(str(path))
    assert expected in re.sub(r"(yml:\d+):\d+", r"\1", str(caught.value))
    assert "hunter2" not in str(caught.value)


def test_missing_bcrypt_is_named_with_the_extra_to_install(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "bcrypt", None)

    with pytest.raises(ConfigError, match=r"pip install 'azure-notbefore\[web\]'"):
        Access(Server(web_config_file=place.write(users=HASHES)))

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

        assert ask(server, path, Authorization=basic("prometheus", "x"))[0] == 401

        _, _, body = ask(server, path, Authorization=GOOD)
        assert json.loads(body)["reasons"] == ["the state is in /secret"]


@contextmanager
def held_passwords(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Comparing the password `wrong` lasts until the end; the event says that it has begun."""
    held = threading.Event()
    release = threading.Event()
    compute = WebConfig.password_fits

    def slow(config: WebConfig, user: str, password: bytes) -> bool:
        if password == b"wrong":
            held.set()
            release.wait(20)
        return compute(config, user, password)

    monkeypatch.setattr(WebConfig, "password_fits", slow)
    try:
        yield held
    finally:
        release.set()


def test_wrong_passwords_do_not_delay_clients_with_a_known_password(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        serving(place.write(users=HASHES, tls=None)) as server,
        ThreadPoolExecutor(8) as pool,
        held_passwords(monkeypatch) as held,
    ):
        assert ask(server, "/metrics", Authorization=GOOD)[0] == 200

        asking = [pool.submit(ask, server, "/metrics", Authorization=WRONG) for _ in range(8)]

        assert held.wait(20)
        for path in ("/metrics", "/", "/api/v1/events"):
            assert ask(server, path, Authorization=GOOD)[0] == 200
        assert ask(server, "/healthz")[0] == 200
        assert ask(server, "/metrics", Authorization="Basic !!!")[0] == 401
        # one is being compared, the others are sent away
        eventually(lambda: sum(request.done() for request in asking) == 7)

        refused = [request.result()[:2] for request in asking if request.done()]
        assert {(status, headers["Retry-After"]) for status, headers in refused} == {(429, "1")}


def test_unknown_user_costs_as_much_as_a_wrong_password(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    check = bcrypt.checkpw

    def watched(password: bytes, hashed: bytes) -> bool:
        compared.append(hashed[:7])
        return check(password, hashed)

    monkeypatch.setattr(bcrypt, "checkpw", watched)
    config = WebConfig(basic_auth_users=HASHES)

    assert [config.password_fits(user, b"wrong") for user in ("browser", "nobody")] == [
        False,
        False,
    ]
    assert compared == [b"$2b$06$", b"$2b$06$"]


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
    context = None if tls is None else place.client()
    with serving(place.write(users=users, tls=tls), listen) as server:
        assert ask(server, "/healthz", context)[0] == 200

    assert warning in caplog.text
    assert bool(warning) == bool(caplog.text)


@PUBLIC
def test_insecure_public_listener_warns(caplog: pytest.LogCaptureFixture, listen: str) -> None:
    with serving(None, listen, insecure=True) as server:
        assert ask(server, "/healthz")[0] == 200

    assert "everyone who reaches" in caplog.text
