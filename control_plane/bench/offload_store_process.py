"""A KV store as a process of its own for as long as a benchmark runs. Knows nothing of what is kept in it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from control_plane.options import ConfigError

_START_S, _STOP_S = 120.0, 60.0


@dataclass(frozen=True, slots=True)
class StoreSize:
    """Its tiers."""

    cpu_bytes: int
    ssd_dir: Path | None = None
    ssd_bytes: int = 0


class StoreProcess:
    """`nanoflow kvstore` on a socket of its own. Everything goes to SSD at once, where there is one."""

    def __init__(self, size: StoreSize) -> None:
        """Start, and wait until it is ready. Raises ConfigError with what it said if it does not get so far."""
        self._size = size
        self._folder = tempfile.TemporaryDirectory(prefix="nanoflow-store-")
        self.address = f"unix:{self._folder.name}/run/kvstore.sock"
        self._process: subprocess.Popen[str] | None = None
        self._start()

    def restart(self) -> None:
        """End it in order and start it again: what it had in memory only is gone."""
        self._stop()
        self._start()

    def close(self) -> None:
        """End it. Idempotent."""
        self._stop()
        self._folder.cleanup()

    def _start(self) -> None:
        command = [sys.executable, "-m", "control_plane.main", "kvstore", "--cpu-bytes", str(self._size.cpu_bytes)]
        command += ["--socket", self.address.removeprefix("unix:")]
        if self._size.ssd_dir is not None:
            command += ["--ssd-dir", str(self._size.ssd_dir), "--ssd-bytes", str(self._size.ssd_bytes)]
            command += ["--ssd-after-hits", "0"]
        root = str(Path(__file__).parents[2])
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
        log = Path(self._folder.name) / "store.log"
        with log.open("a") as file:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True, env=environment)
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _START_S)
        if not ready or "ready on" not in self._process.stdout.readline():
            said = log.read_text().strip()
            self.close()
            raise ConfigError(f"the KV store does not start: {said}")

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_STOP_S)
        if process.stdout is not None:
            process.stdout.close()
