"""Option 245 in the files of each DHCP client.

Those in `tests/leases` were written by the clients themselves, but NetworkManager's, which follows its form.
"""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notbefore.imds.elsewhere import LEASES as CLIENTS
from notbefore.imds.elsewhere import address_in

FILES = Path(__file__).parent.parent / "leases"
OPTIONS = {client: option for client, _, option in CLIENTS}


def lease(name: str) -> bytes:
    return (FILES / name).read_bytes()


@pytest.mark.parametrize(
    ("client", "name", "address"),
    [
        ("systemd-networkd", "networkd", "98.76.54.32"),
        ("dhclient", "dhclient.leases", "10.99.0.1"),
        ("dhclient", "dhclient-printable.leases", "98.76.54.32"),  # the newest, and written as text
        ("NetworkManager", "network-manager", "168.63.129.16"),
    ],
)
def test_each_client_says_it_in_its_own_way(client: str, name: str, address: str) -> None:
    assert address_in(lease(name), OPTIONS[client]) == address
    without = lease(name).replace(b"245", b"244")
    assert address_in(without, OPTIONS[client]) is None


@pytest.mark.parametrize(
    ("value", "address"),
    [
        (b"a8:3f:81:10", "168.63.129.16"),
        (b'"b\\"6 "', "98.34.54.32"),
        (b'"\\250?\\201\\020"', "168.63.129.16"),
        (b"a8:3f:81", None),
        (b"a8:3f:81:10:00", None),
        (b"a8:3f:81:100", None),
        (b'"bL6"', None),
        (b"nonsense", None),
        (b"\xff", None),
        (b"0:0:0:0", None),  # what follows cannot be another machine
        (b"7f:0:0:1", None),
        (b"e0:0:0:1", None),
        (b"ff:ff:ff:ff", None),
    ],
)
def test_four_bytes_are_written_in_several_ways(value: bytes, address: str | None) -> None:
    assert address_in(b"lease {\n  option unknown-245 " + value + b";\n}\n", OPTIONS["dhclient"]) == address


@given(st.binary(max_size=600))
def test_no_bytes_break_a_parser(noise: bytes) -> None:
    for option in OPTIONS.values():
        for text in (noise, b"OPTION_245=" + noise, b"private_245=" + noise, b"option unknown-245 " + noise + b";"):
            found = address_in(text, option)
            assert found is None or len(found.split(".")) == 4
