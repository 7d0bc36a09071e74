"""A `nanoflow kvstore` process of this process's own: started, watched, ended with it.

It ends when its stdin does, so not even a killed parent leaves one behind. Knows nothing of Ray, nor of when to
start it again.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from control_plane.options import PREFIX
from control_plane.store_affinity import Affinity, beside_gpus, started_on
from kvstore.keys import StoreError
from worker.numa import SYSFS

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 12.0  # from SIGTERM to SIGKILL: what waits for the SSD is still written
_ROOT = Path(__file__).resolve().parents[1]


class StoreHost:
    """One store process at a time, always on the same socket."""

    def __init__(
        self,
        socket: Path,
        flags: Sequence[str],
        ready_timeout_s: float,
        beside_gpu: bool = False,
        sysfs: Path = SYSFS,
    ) -> None:
        """socket: in a folder of its own, which is removed at the end. flags: of `nanoflow kvstore`, no secrets.

        beside_gpu: run on the CPUs of the GPU's NUMA node, and so with its memory, where that is known.
        """
        self._beside_gpu = beside_gpu
        self._sysfs = sysfs
        self._socket = socket
        self._command = [sys.executable, "-P", "-m", "control_plane.main", "kvstore", "--socket", str(socket), *flags]
        self._ready_timeout_s = ready_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._listening: threading.Thread | None = None
        self._last_words = ""

    def start(self) -> int:
        """Start it and wait until it takes calls; its process id. Raises StoreError with the reason if it does not."""
        self._end(0.0)
        process = started_on(self._affinity().cpus, self._start_process)
        self._process, self._last_words = process, ""
        self._listening = threading.Thread(target=self._listen, args=(process,), name="kvstore-log", daemon=True)
        self._listening.start()
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], self._ready_timeout_s)
        if not ready:
            self._end(0.0)
            raise StoreError(f"the KV store was not ready within {self._ready_timeout_s:g} s: give it less memory?")
        if b"ready" not in process.stdout.readline():
            self._end(0.0)
            raise StoreError(f"the KV store did not start: {self._last_words or 'it gives no reason'}")
        return process.pid

    def where(self) -> str:
        """On which CPUs it runs and why, in words."""
        return self._affinity().reason

    def ended(self) -> str | None:
        """How it ended, in words; None while it runs."""
        if self._process is None:
            return "it was not started"
        code = self._process.poll()
        if code is None:
            return None
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        return f"{how}: {self._last_words}" if self._last_words else how

    def stop(self) -> None:
        """End it for good. Idempotent."""
        self._end(STOP_TIMEOUT_S)
        shutil.rmtree(self._socket.parent, ignore_errors=True)

    def _affinity(self) -> Affinity:
        return beside_gpus(self._sysfs) if self._beside_gpu else Affinity(frozenset(), "on any CPU")

    def _start_process(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*self._command, "--store-ends-with-stdin"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(),
        )

    def _end(self, patience_s: float) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None and patience_s:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(patience_s)
        process.kill()
        process.wait()
        if self._listening is not None:
            self._listening.join(1.0)  # to the last of its words
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        """Its log is part of ours."""
        assert process.stderr is not None
        for line in process.stderr:
            words = line.decode(errors="replace").strip()
            if words:
                self._last_words = words.removeprefix("nanoflow: ")
                log.info("%s", words)


def _environment() -> dict[str, str]:
    """Ours, without options that are meant for other commands."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    path = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(path)}
