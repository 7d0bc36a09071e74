"""How a store is set up: sizes and policies, and where it listens. Plain data; imports nothing heavy."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from kvstore.address import check_socket_path
from kvstore.keys import StoreError
from kvstore.record import SLOT_ALIGNMENT

MIN_CPU_BYTES = 1 << 16
MIN_SSD_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class KVServiceConfig:
    """Sizes and policies of one store."""

    cpu_bytes: int  # of the arena
    ssd_dir: Path | None = None  # None: no SSD tier
    ssd_bytes: int = 0  # of segments and index
    slab_bytes: int | None = None  # of the arena, for records of one size, so the largest; None: by cpu_bytes
    segment_bytes: int | None = None  # the same on SSD: size of a file; None: by ssd_bytes
    ssd_after_hits: int = 2  # hits after which a record is copied to SSD; 0: all are
    lease_s: float = 10.0
    quarantine_s: float = 60.0  # how long a dead writer's bytes are given to nobody else
    arena_folder: Path = Path("/dev/shm")  # where shm_open puts its files on Linux

    def check(self) -> None:
        """Raise StoreError for sizes that no store can have."""
        if self.cpu_bytes < MIN_CPU_BYTES:
            raise StoreError(f"cpu-bytes is {self.cpu_bytes}: at least {MIN_CPU_BYTES} are needed")
        if self.ssd_dir is not None and self.ssd_bytes < MIN_SSD_BYTES:
            raise StoreError(f"ssd-bytes is {self.ssd_bytes}: at least {MIN_SSD_BYTES} are needed")

    def slab(self) -> int:
        """Bytes of one slab of the arena, as used."""
        return _part(self.slab_bytes, self.cpu_bytes, 1 << 30)

    def segment(self) -> int:
        """Bytes of one segment file, as used."""
        return _part(self.segment_bytes, self.ssd_bytes, 256 << 20)


def _part(wanted: int | None, total: int, most: int) -> int:
    """Of a tier, the part that holds records of one size: small enough to change hands, large enough for records.

    What a part has left behind its last whole record is lost, so it should be many records long.
    """
    by_total = max(total // 64, min(total // 8, 16 << 20))
    return min(wanted or min(by_total, most), total) // SLOT_ALIGNMENT * SLOT_ALIGNMENT


@dataclass(frozen=True, slots=True)
class ListenConfig:
    """Where the store answers, and whom."""

    socket: Path | None = None  # a Unix socket; None: TCP
    host: str = "127.0.0.1"
    port: int = 0  # 0 picks a free one
    token: str | None = None  # wanted in `authorization: Bearer TOKEN`
    ssl_keyfile: Path | None = None  # PEM, readable by its owner only; with the two below: mTLS
    ssl_certfile: Path | None = None
    ssl_ca_certs: Path | None = None  # clients must have a certificate from one of these

    def check(self) -> None:
        """Raise StoreError if anybody on the network could call, or the settings do not go together."""
        tls = (self.ssl_keyfile, self.ssl_certfile, self.ssl_ca_certs)
        if any(tls) and not all(tls):
            raise StoreError("TLS needs all of ssl_keyfile, ssl_certfile and ssl_ca_certs")
        if self.socket is None and not self.token and not all(tls):
            raise StoreError("a TCP port needs a token or certificates (mTLS); or use a Unix socket")
        if self.socket is None and not all(tls) and not _is_this_machine(self.host):
            raise StoreError(
                f"store-host {self.host} can be reached over the network, where the token would go in clear: "
                "use certificates (mTLS), or listen on 127.0.0.1 (engines are on this machine anyway)"
            )
        if self.socket is not None:
            check_socket_path(self.socket)


def _is_this_machine(host: str) -> bool:
    """Whether an address is the loopback's, and so nobody else's."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name
        return host == "localhost"
