"""`nanoflow kvstore` as a process of its own, to be stalled, killed and restarted."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from kvstore.arena import remove_abandoned
from kvstore.breaker import BreakerConfig
from kvstore.client import ClientConfig, KVClient

ROOT = Path(__file__).resolve().parents[2]
PATIENT = BreakerConfig(failures=3, open_s=0.2, max_open_s=0.5)  # tries again soon, so that tests are short


class StoreProcess:
    """One store, on a socket in a folder; the same socket and SSD folder after a restart."""

    def __init__(self, folder: Path, **flags) -> None:
        self.folder = folder
        self.socket = folder / "run" / "kv.sock"
        self.ssd_dir = folder / "ssd"
        self._log = folder / "store.log"
        self._flags = {"cpu_bytes": 1 << 20, "slab_bytes": 1 << 16, "socket": self.socket, **flags}
        self.process: subprocess.Popen[str] | None = None
        self.start()

    @property
    def address(self) -> str:
        return f"unix:{self.socket}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def log(self) -> str:
        return self._log.read_text()

    def start(self) -> None:
        """Start, and wait until it says that it is ready."""
        command = [sys.executable, "-m", "control_plane.main", "kvstore"]
        for name, value in self._flags.items():
            command += ["--" + name.replace("_", "-"), str(value)]
        with self._log.open("a") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT)
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], 60)
        line = self.process.stdout.readline() if ready else ""
        if "ready on" not in line:
            self.end()
            raise AssertionError(f"the store did not start: {line!r}; {self.log}")

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """As the kernel does when memory is short."""
        self.signal(signal.SIGKILL)
        self.process.wait(10)

    def terminate(self) -> int:
        """As an operator does; the exit code."""
        self.signal(signal.SIGTERM)
        return self.process.wait(30)

    def end(self) -> None:
        """Kill whatever still runs."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait(10)
        self.process.stdout.close()
        remove_abandoned(Path("/dev/shm"))

    def client(self, **settings) -> KVClient:
        """A client that waits long enough for a busy machine."""
        given = {"call_timeout_s": 2.0, "breaker": PATIENT, **settings}
        return KVClient(ClientConfig(self.address, **given))


def until(condition, timeout_s: float = 10.0) -> bool:
    """Whether it became true in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False
