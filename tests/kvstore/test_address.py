"""Addresses of stores."""

from __future__ import annotations

import pytest

from kvstore.address import check_address
from kvstore.keys import StoreError


@pytest.mark.parametrize(
    "address", ["unix:/tmp/s.sock", "unix:///tmp/s.sock", "localhost:7000", "10.0.0.1:1", "[::1]:65535", "a-b.c_d:80"]
)
def test_sockets_and_ports_are_addresses(address):
    check_address(address)


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("nonsense", "give unix:"),
        ("", "give unix:"),
        ("unix:", "give unix:"),
        ("unix:relative.sock", "give unix:"),
        ("/tmp/s.sock", "give unix:"),
        ("http://localhost:7000", "give unix:"),
        ("localhost:", "give unix:"),
        (":7000", "give unix:"),
        ("::1:7000", "give unix:"),
        ("localhost:7000\n", "give unix:"),
        ("localhost:0", "1 to 65535"),
        ("localhost:99999", "1 to 65535"),
        ("unix:/" + 107 * "x", "107 bytes"),
    ],
)
def test_anything_else_is_none(address, problem):
    with pytest.raises(StoreError, match=problem):
        check_address(address)
