"""The services of the table in docs/notifications.md, through apprise.

apprise sends to the services' own names, over TLS and a proxy, which leads to a stand-in here.
"""

import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest
import trustme

from notbefore.config.secret import Secret
from notbefore.config.sinks import Apprise, SinkConfig
from notbefore.core.duration import Duration
from notbefore.core.message import Message
from notbefore.errors import SendError
from support.azure import STARTED
from support.messages import message, outcomes, sink_of
from support.peers import Answer, HttpPeer, Request
from support.raw_server import serving, tunnel

DOCUMENT: Final = Path(__file__).parents[2] / "docs" / "notifications.md"
ROW: Final = re.compile(r"^\| (\w+) \| `(\w+://\S+)` \|", re.MULTILINE)
HOSTS: Final = (
    "api.opsgenie.com",
    "prod-12.westeurope.logic.azure.com",
    "api.telegram.org",
    "ntfy.sh",
    "mattermost.example.org",
    "discord.com",
)
REBOOT: Final = {"EventType": "Reboot"}
STEPS: Final = (
    message(REBOOT),
    message(REBOOT, REBOOT | STARTED),
    message(REBOOT, REBOOT | STARTED, None),
)
TITLES: Final = (
    "Reboot of WestNO_0 in 14 min",
    "Reboot of WestNO_0 has started",
    "Reboot of WestNO_0 is over",
)
FACT: Final = "Affected VMs: WestNO_0"


def documented_urls() -> dict[str, str]:
    """Return the URL of each service, as the document has it."""
    document = DOCUMENT.read_text(encoding="utf-8")
    _, _, section = document.partition("### apprise\n")
    section, _, _ = section.partition("\n### ")
    return dict(ROW.findall(section))


@pytest.fixture
def services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpPeer]:
    """A server that all names of the services lead to, with a certificate for each."""
    authority = trustme.CA()
    bundle = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(bundle))
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(bundle))
    monkeypatch.setenv("NO_PROXY", "")
    with HttpPeer(authority, *HOSTS) as peer, serving(tunnel(peer.port)) as (proxy, _):
        monkeypatch.setenv("HTTPS_PROXY", proxy)
        yield peer


def sink_for(url: str) -> SinkConfig:
    return SinkConfig(apprise=Apprise(url=Secret(url), timeout=Duration("60s")))


def send(url: str, *steps: Message) -> None:
    with closing(sink_of(sink_for(url))) as sink:
        for step in steps:
            sink.send(step)


def bodies(services: HttpPeer) -> list[dict[str, Any]]:
    return [json.loads(request.body) for request in services.requests]


def places(services: HttpPeer) -> set[str]:
    """Return the hosts and paths that were asked."""
    return {place_of(request) for request in services.requests}


def place_of(request: Request) -> str:
    return request.headers["host"] + request.path.partition("?")[0]


def test_table_of_services_is_complete() -> None:
    services = ["Opsgenie", "Teams", "Telegram", "ntfy", "Mattermost", "Discord"]

    assert list(documented_urls()) == services


def test_opsgenie_has_one_alert_for_the_steps_until_the_end(services: HttpPeer) -> None:
    services.default = Answer(202, body=b'{"requestId": "r-1"}')
    url = documented_urls()["Opsgenie"]

    announced, started, end = outcomes(sink_of(sink_for(url)), *STEPS)

    opened, repeated = bodies(services)
    assert places(services) == {"api.opsgenie.com/v2/alerts"}
    assert services.requests[0].headers["authorization"].startswith("GenieKey ")
    assert opened["message"] == TITLES[0]
    assert FACT in opened["description"]
    assert opened["alias"] == repeated["alias"] == STEPS[0].alert_key
    assert not isinstance(announced, SendError)
    assert not isinstance(started, SendError)
    assert isinstance(end, SendError)
    assert end.permanent
    assert "close the alert by hand" in str(end)


def test_teams_shows_a_card_for_each_step(services: HttpPeer) -> None:
    services.default = Answer(202)

    send(documented_urls()["Teams"], *STEPS)

    cards = [body["attachments"][0]["content"] for body in bodies(services)]
    texts = [{block.get("id"): block.get("text") for block in card["body"]} for card in cards]
    (place,) = places(services)
    assert place.startswith("prod-12.westeurope.logic.azure.com/workflows/")
    assert "sig=" in services.requests[0].path
    assert [text["title"] for text in texts] == list(TITLES)
    assert "Affected VMs: WestNO\\_0\n\n" in texts[0]["body"]
    assert [card["type"] for card in cards] == ["AdaptiveCard"] * 3


def test_telegram_shows_a_message_for_each_step(services: HttpPeer) -> None:
    services.default = Answer(body=b'{"ok": true, "result": {}}')

    send(documented_urls()["Telegram"], *STEPS)

    messages = bodies(services)
    (place,) = places(services)
    assert re.fullmatch(r"api\.telegram\.org/bot\d+:[\w-]+/sendMessage", place)
    assert [sent["chat_id"] for sent in messages] == [-1001234567890] * 3
    assert [sent["text"].splitlines()[0] for sent in messages] == [
        f"<b>{title}</b>" for title in TITLES
    ]
    assert FACT in messages[0]["text"]


def test_ntfy_shows_a_notification_for_each_step(services: HttpPeer) -> None:
    services.default = Answer(body=b"{}")

    send(documented_urls()["ntfy"], *STEPS)

    notifications = bodies(services)
    assert places(services) == {"ntfy.sh/"}
    assert [sent["title"] for sent in notifications] == list(TITLES)
    assert FACT in notifications[0]["message"]
    assert {sent["topic"] for sent in notifications} == {"my-topic"}


def test_mattermost_shows_a_message_for_each_step(services: HttpPeer) -> None:
    send(documented_urls()["Mattermost"], *STEPS)

    messages = bodies(services)
    (place,) = places(services)
    assert place.startswith("mattermost.example.org/hooks/")
    assert [sent["text"].splitlines()[0] for sent in messages] == list(TITLES)
    assert FACT in messages[0]["text"]
    assert {sent["username"] for sent in messages} == {"notbefore"}


def test_discord_shows_a_message_for_each_step(services: HttpPeer) -> None:
    services.default = Answer(204, body=b"")

    send(documented_urls()["Discord"], *STEPS)

    messages = bodies(services)
    (place,) = places(services)
    assert place.startswith("discord.com/api/webhooks/")
    assert [sent["content"].splitlines()[0] for sent in messages] == list(TITLES)
    assert FACT in messages[0]["content"]


def test_discord_shows_a_colored_card_when_the_format_is_markdown(
    services: HttpPeer,
) -> None:
    services.default = Answer(204, body=b"")

    send(documented_urls()["Discord"] + "?format=markdown", STEPS[0], STEPS[2])

    started, over = (body["embeds"][0] for body in bodies(services))
    assert [started["title"], over["title"]] == [TITLES[0], TITLES[2]]
    assert started["color"] != over["color"]


@pytest.mark.parametrize("body_format", ["text", "markdown"])
@pytest.mark.parametrize("service", ["Teams", "Telegram", "ntfy", "Mattermost", "Discord"])
def test_text_of_azure_mentions_no_one(services: HttpPeer, service: str, body_format: str) -> None:
    services.default = Answer(body=b'{"ok": true, "result": {}}')
    evil = {"EventType": "@Everyone", "Description": "@here (@all) x@channel <!channel> <@U1> @eve"}
    url = documented_urls()[service]
    separator = "&" if "?" in url else "?"

    send(f"{url}{separator}format={body_format}", message(evil))

    text = json.dumps(bodies(services), ensure_ascii=False).lower()
    for mention in ("@everyone", "@here", "@all", "@channel", "@u1", "@eve", "<!channel"):
        assert mention not in text
    assert "@\u200beveryone of westno" in text
    assert "👉" not in text  # apprise marks mentions with it


@pytest.mark.parametrize("service", ["Teams", "Telegram", "ntfy", "Mattermost", "Discord"])
def test_refusal_of_a_service_is_permanent_and_without_its_secret(
    services: HttpPeer, service: str
) -> None:
    services.default = Answer(400, body=b'{"ok": false, "description": "no"}')

    (error,) = outcomes(sink_of(sink_for(documented_urls()[service])), STEPS[0])

    assert isinstance(error, SendError)
    assert error.permanent
    assert "400" in str(error)
