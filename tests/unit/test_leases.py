"""Option 245 in the files of each DHCP client.

Those in `tests/leases` were written by the clients themselves, but NetworkManager's, which follows its form.
"""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notbefore.imds.inform import request
from notbefore.imds.leases import (
    COOKIE,
    address_of,
    from_dhclient,
    from_network_manager,
    from_networkd,
    from_packet,
    options,
)

LEASES = Path(__file__).parent.parent / "leases"


def lease(name: str) -> bytes:
    return (LEASES / name).read_bytes()


def packet(*fields: bytes, sname: bytes = b"", file: bytes = b"") -> bytes:
    return bytes(44) + sname.ljust(64, b"\0") + file.ljust(128, b"\0") + COOKIE + b"".join(fields)


def test_each_client_says_it_in_its_own_way() -> None:
    assert from_networkd(lease("networkd")) == "98.76.54.32"
    assert from_dhclient(lease("dhclient.leases")) == "10.99.0.1"
    assert from_dhclient(lease("dhclient-printable.leases")) == "98.76.54.32"  # the newest, and written as text
    assert from_network_manager(lease("network-manager")) == "168.63.129.16"
    assert from_network_manager(lease("networkd")) == "98.76.54.32"
    assert from_packet(lease("dhcpcd.lease")) == "10.99.0.1"


@pytest.mark.parametrize("name", ["networkd", "dhclient.leases", "network-manager", "dhcpcd.lease"])
def test_without_the_option_there_is_nothing(name: str) -> None:
    without = lease(name).replace(b"245", b"244").replace(b"\xf5\x04", b"\xf4\x04")
    for parser in (from_networkd, from_dhclient, from_network_manager, from_packet):
        assert parser(without) is None


@pytest.mark.parametrize(
    ("value", "address"),
    [
        (b"a8:3f:81:10", "168.63.129.16"),
        (b"168.63.129.16", "168.63.129.16"),
        (b'"b\\"6 "', "98.34.54.32"),
        (b'"\\250?\\201\\020"', "168.63.129.16"),
        (b"a8:3f:81", None),
        (b"a8:3f:81:10:00", None),
        (b"1.2.3.999", None),
        (b'"bL6"', None),
        (b"nonsense", None),
    ],
)
def test_four_bytes_are_written_in_several_ways(value: bytes, address: str | None) -> None:
    assert from_dhclient(b"lease {\n  option unknown-245 " + value + b";\n}\n") == address


@pytest.mark.parametrize("octets", [b"\0\0\0\0", b"\x7f\0\0\1", b"\xe0\0\0\1", b"\xff\xff\xff\xff", b"", b"12345"])
def test_what_cannot_be_another_machine_is_no_address(octets: bytes) -> None:
    assert address_of(octets) is None


def test_an_option_may_come_in_parts_and_in_other_fields() -> None:
    assert from_packet(packet(b"\xf5\x02\xa8\x3f", b"\0\0", b"\xf5\x02\x81\x10", b"\xff")) == "168.63.129.16"
    overloaded = packet(b"\x34\x01\x03\xff", sname=b"\xf5\x02\x81\x10\xff", file=b"\xf5\x02\xa8\x3f\xff")
    assert from_packet(overloaded) == "168.63.129.16"
    assert from_packet(packet(b"\xf5\x04\xa8\x3f")) is None  # cut off
    assert from_packet(packet(b"\xff\xf5\x04\xa8\x3f\x81\x10")) is None  # behind the end


def test_the_question_is_an_inform_for_that_one_option() -> None:
    asked = request(b"abcd", "10.0.0.4", bytes(range(6)))
    assert len(asked) == 300
    assert (asked[0], asked[4:8], asked[12:16], asked[28:34]) == (1, b"abcd", b"\x0a\0\0\4", bytes(range(6)))
    assert options(asked) == {53: b"\x08", 55: b"\xf5"}


@given(st.binary(max_size=600))
def test_no_bytes_break_a_parser(noise: bytes) -> None:
    for parser in (from_networkd, from_dhclient, from_network_manager, from_packet):
        for text in (noise, b"OPTION_245=" + noise, b"option unknown-245 " + noise + b";", packet(noise)):
            found = parser(text)
            assert found is None or len(found.split(".")) == 4
