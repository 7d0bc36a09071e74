"""A `nanoflow kvstore` process of this process's own: started, watched, ended with it.

It ends when its stdin does and takes its folder along, so not even a killed parent leaves anything behind. Knows
nothing of Ray, nor of when to start it again.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import select
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from control_plane.options import PREFIX, default_of
from control_plane.store_affinity import Affinity, beside_gpus, started_on
from kvstore import arena
from kvstore.keys import StoreError
from kvstore.settings import KVServiceConfig
from worker.numa import SYSFS

STOP_TIMEOUT_S = 12.0  # from SIGTERM to SIGKILL: what waits for the SSD is still written
_ROOT = Path(__file__).resolve().parents[1]
_SOCKET = "kvstore.sock"
_YOUNG_S = 60.0  # a folder of that age may belong to a store that is just being started
_MOST_LINES = 1000  # of log that nobody has asked for
_LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+ (?P<level>[DIWEC]) (?P<words>.*)")  # as `nanoflow kvstore` logs
_LEVELS = {name[0]: logging.getLevelName(name) for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")}


@dataclass(frozen=True, slots=True)
class LogLine:
    """What a store said on stderr."""

    level: int  # of `logging`
    words: str

    @classmethod
    def of(cls, line: str) -> LogLine:
        """A line of its log, or whatever else it wrote."""
        found = _LOG_LINE.fullmatch(line)
        if found is None:
            return cls(logging.INFO, line.removeprefix("nanoflow: "))
        return cls(_LEVELS[found["level"]], found["words"])


def own_socket() -> Path:
    """A socket that no other store has, in a folder of its own, on whatever node."""
    return Path(f"{_own_prefix()}{secrets.token_hex(4)}/{_SOCKET}")


def _own_prefix() -> str:
    return f"/tmp/nanoflow-{os.geteuid()}-"


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
        self._said: deque[LogLine] = deque(maxlen=_MOST_LINES)

    def start(self) -> int:
        """Start it and wait until it takes calls; its process id. Raises StoreError with the reason if it does not."""
        self._end(0.0)
        remove_abandoned(self._socket.parent.parent)
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
        if code < 0:  # what it said before has nothing to do with it
            return f"signal {-code}"
        return f"exit code {code}: {self._last_words}" if self._last_words else f"exit code {code}"

    def said(self) -> list[LogLine]:
        """What it has logged since the last call. Safe for threads."""
        lines = []
        with suppress(IndexError):
            while True:
                lines.append(self._said.popleft())
        return lines

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
        arena.remove_abandoned(default_of(KVServiceConfig, "arena_folder"))  # its memory: it may be why it died
        if self._listening is not None:
            self._listening.join(1.0)  # to the last of its words
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            text = line.decode(errors="replace").strip()
            if text:
                said = LogLine.of(text)
                self._last_words = said.words
                self._said.append(said)


def remove_abandoned(parent: Path, young_s: float = _YOUNG_S) -> list[Path]:
    """Remove folders of `own_socket` whose stores were killed together with who started them; which ones."""
    removed = []
    for folder in parent.glob(Path(_own_prefix()).name + "*"):
        with suppress(OSError):
            found = folder.lstat()
            if found.st_uid != os.geteuid() or time.time() - found.st_mtime < young_s:
                continue
            if _is_abandoned(folder):
                shutil.rmtree(folder)
                removed.append(folder)
    return removed


def _is_abandoned(folder: Path) -> bool:
    """Whether it holds nothing but what a store that is gone has left. Raises OSError."""
    lock = folder / f"{_SOCKET}.lock"
    if {path.name for path in folder.iterdir()} - {_SOCKET, lock.name}:
        return False
    if not lock.exists():
        return True
    descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a store that runs holds it
    finally:
        os.close(descriptor)
    return True


def _environment() -> dict[str, str]:
    """Ours, without options that are meant for other commands."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    path = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(path)}
