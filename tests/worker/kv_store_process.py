"""`nanoflow kvstore` as a process of its own, for engines in this one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kvstore.client import ClientConfig, KVClient

ROOT = Path(__file__).parents[2]


class StoreProcess:
    """`nanoflow kvstore` on a socket."""

    def __init__(self, folder: Path) -> None:
        self.address = f"unix:{folder / 'run' / 'kv.sock'}"
        self._command = [sys.executable, "-m", "control_plane.main", "kvstore", "--cpu-bytes", str(16 << 20)]
        self._command += ["--slab-bytes", str(1 << 20), "--socket", str(folder / "run" / "kv.sock")]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self.process.stdout is not None
        assert "ready" in self.process.stdout.readline()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(20)

    def stats(self) -> dict[str, int]:
        client = KVClient(ClientConfig(self.address))
        found = client.stats() or {}
        client.close()
        return found
