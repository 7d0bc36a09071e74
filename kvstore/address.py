"""Addresses of stores as users write them. Knows nothing of who connects to them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from kvstore.keys import StoreError

_MAX_SOCKET_PATH_BYTES = 107  # of Linux
_HOST_PORT = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")


def check_address(address: str) -> None:
    """Raise StoreError for what is neither unix:/path nor HOST:PORT."""
    scheme, _, path = address.partition(":")
    if scheme == "unix" and path.startswith("/"):
        check_socket_path(path)
        return
    found = _HOST_PORT.fullmatch(address)
    if found is None:
        raise StoreError(f"{address} is no address of a store: give unix:/path/of/its/socket, or HOST:PORT")
    if not 0 < int(found["port"]) < 1 << 16:
        raise StoreError(f"{address}: ports are 1 to 65535")


def check_socket_path(path: str | Path) -> None:
    """Raise StoreError for one that is too long for a socket."""
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
        raise StoreError(f"{path} is longer than the {_MAX_SOCKET_PATH_BYTES} bytes of a socket's path")
