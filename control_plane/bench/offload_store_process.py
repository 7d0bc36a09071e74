"""A KV store as a process of its own for as long as a benchmark runs. Knows nothing of what is kept in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from control_plane.options import ConfigError
from control_plane.store_host import StoreHost, own_socket
from kvstore.keys import StoreError

_READY_S = 120.0


@dataclass(frozen=True, slots=True)
class StoreSize:
    """Its tiers."""

    cpu_bytes: int
    ssd_dir: Path | None = None
    ssd_bytes: int = 0


class StoreProcess:
    """A store on a socket of its own. Everything goes to SSD at once, where there is one.

    It ends with this process, however that ends.
    """

    def __init__(self, size: StoreSize) -> None:
        """Start, and wait until it is ready. Raises ConfigError with what it said if it does not get so far."""
        flags = ["--cpu-bytes", str(size.cpu_bytes)]
        if size.ssd_dir is not None:
            flags += ["--ssd-dir", str(size.ssd_dir), "--ssd-bytes", str(size.ssd_bytes), "--ssd-after-hits", "0"]
        socket = own_socket()
        self.address = f"unix:{socket}"
        self._host = StoreHost(socket, flags, _READY_S)
        self._start()

    def restart(self) -> None:
        """End it in order and start it again: what it had in memory only is gone."""
        self._host.stop()
        self._start()

    def close(self) -> None:
        """End it. Idempotent."""
        self._host.stop()

    def _start(self) -> None:
        try:
            self._host.start()
        except StoreError as error:
            self.close()
            raise ConfigError(str(error)) from None
