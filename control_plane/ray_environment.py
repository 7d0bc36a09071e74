"""Environment variables that Ray reads once, when it is imported. Imports nothing of Ray itself."""

from __future__ import annotations

import secrets
from collections.abc import MutableMapping


def prepare(environ: MutableMapping[str, str]) -> None:
    """Set what a server needs. To be called before the first `import ray`; settings of the user's stay.

    A cluster that RAY_ADDRESS names has its own settings. A local one listens on loopback only, and gets a token
    that only this process and its children know, since Ray runs whatever it is sent (CVE-2023-48022).
    """
    environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # processes without a GPU keep what is set
    if environ.get("RAY_ADDRESS", "") not in ("", "local"):
        return
    # What Ray does by default on systems other than Linux: it takes 127.0.0.1 as it is, rather than replacing it by
    # an address that other machines reach.
    environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    if "RAY_AUTH_MODE" not in environ:
        environ["RAY_AUTH_MODE"] = "token"
        environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
