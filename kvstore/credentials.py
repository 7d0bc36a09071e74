"""Secrets in files, which nobody but their owner may read. Knows nothing of what they are for."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kvstore.keys import StoreError

_MAX_BYTES = 1 << 16


def read_secret(path: Path) -> bytes:
    """The contents of a file of this user's own. Raises StoreError where others could read or change it."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
                raise StoreError(f"{path} holds a secret and must be this user's own and closed to others: chmod 600")
            return file.read(_MAX_BYTES)
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from None


def read_token(path: Path) -> str:
    """The one line of a token file. Raises StoreError where there is none, or others could read it."""
    try:
        token = read_secret(path).decode("ascii").strip()
    except UnicodeDecodeError:
        token = ""
    if not token or not token.isprintable() or " " in token:
        raise StoreError(f"{path} is no token file: it must hold one line of visible ASCII characters")
    return token
