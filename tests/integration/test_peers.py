"""Whether the agent of another VM is alive, and has seen what is to be notified."""

import pytest

from notbefore.config.sinks import PeersConfig
from notbefore.courier.peers import Peers
from support.peers import HttpPeer, Say


@pytest.mark.parametrize(
    ("answer", "alive"),
    [
        (Say(), True),  # it does not say since when
        (Say(headers=(("X-Notbefore-Watching", "30.0"),)), True),
        (Say(headers=(("X-Notbefore-Watching", "2.0"),)), False),  # it was started after the change
        (Say(headers=(("X-Notbefore-Watching", "soon"),)), False),
        (Say(401), True),  # nobody can say more than that it listens
        (Say(503, headers=(("X-Notbefore-Watching", "30.0"),)), False),
        (Say(how="cut"), False),
    ],
)
def test_an_agent_notifies_itself_where_it_works_and_has_seen_the_change(answer: Say, *, alive: bool) -> None:
    with HttpPeer() as peer:
        peer.default = answer
        peers = Peers(PeersConfig(url=f"{peer.url}/{{vm}}/readyz"))
        assert peers.any_alive(["vm_0"], since=12.5) == alive
        assert [request.path for request in peer.requests] == ["/vm_0/readyz"]


def test_many_messages_at_once_ask_a_vm_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with HttpPeer() as peer:
        peer.default = Say(headers=(("X-Notbefore-Watching", "30.0"),))
        peers = Peers(PeersConfig(url=f"{peer.url}/{{vm}}/readyz"))
        assert [peers.any_alive(["vm_0"], since) for since in (20.0, 40.0, 10.0)] == [True, False, True]
        assert not peers.any_alive(["vm_1"], since=40.0)
        assert [request.path for request in peer.requests] == ["/vm_0/readyz", "/vm_1/readyz"]
        monkeypatch.setattr("notbefore.courier.peers.KEPT", 0.0)
        assert peers.any_alive(["vm_0"])
        assert len(peer.requests) == 3


def test_without_a_configuration_nobody_is_known_to_be_alive() -> None:
    assert not Peers(None).any_alive(["vm_0"])
