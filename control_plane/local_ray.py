"""A Ray of our own on this machine: its processes in a session apart, on loopback only, gone when we are.

In a session of their own, signals to our process group (Ctrl-C in a terminal, `timeout`, service managers) do not
reach them: the drain that such a signal asks for still has something to run on. A shell of the same session waits
for our end, however it comes, and ends them. Knows nothing of what runs on Ray.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from control_plane.errors import StartError

START_TIMEOUT_S = 60.0
OBJECT_STORE_BYTES = 128 * 2**20  # plans and tokens only; KV and weights never pass through it
_END_TIMEOUT_S = 5.0
# Starts Ray ("$@"), says so, and stays until stdin ends: with us. Then it ends its whole process group.
_GUARD = '"$@" >"$TMPDIR/start.log" 2>&1 || exit 1; echo started; read -r _; rm -rf "$TMPDIR"; kill -KILL 0'


class LocalRay:
    """A running head node. Made by `start`."""

    def __init__(self, guard: subprocess.Popen[bytes], folder: Path) -> None:
        self._guard = guard
        self.folder = folder  # Ray's sockets and logs; removed at the end

    @classmethod
    async def start(cls, num_cpus: int) -> LocalRay:
        """Start a head node without dashboard. Raises StartError; leaves nothing behind when cancelled."""
        # Paths of sockets in it may have no more than 107 characters.
        folder = Path(tempfile.mkdtemp(prefix="nanoflow-", dir=os.environ.get("RAY_TMPDIR")))
        guard = _guard(num_cpus, folder)
        ray = cls(guard, folder)
        try:
            assert guard.stdout is not None
            async with asyncio.timeout(START_TIMEOUT_S):
                started = await asyncio.to_thread(guard.stdout.readline)
            if not started:
                reason = _last_line(folder / "start.log")
                raise StartError(f"Ray cannot be started here: {reason}. `nanoflow doctor` checks the machine")
        except TimeoutError:
            await ray.stop()
            raise StartError(
                f"Ray has not started within {START_TIMEOUT_S:g} s: `nanoflow doctor` checks the machine"
            ) from None
        except BaseException:
            await ray.stop()
            raise
        return ray

    @property
    def address(self) -> str:
        """HOST:PORT of its control service."""
        return (self.folder / "ray_current_cluster").read_text().strip()

    @property
    def processes(self) -> list[psutil.Process]:
        """All that run in its session, but for the guard."""
        guard = self._guard.pid
        return [each for each in psutil.process_iter() if each.pid != guard and _session_of(each) == guard]

    async def stop(self) -> None:
        """End all its processes at once and remove its files. Idempotent."""
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._guard.pid, signal.SIGKILL)
        self._guard.wait()
        deadline = time.monotonic() + _END_TIMEOUT_S
        while (left := self.processes) and time.monotonic() < deadline:
            for process in left:  # actors have groups of their own
                with suppress(psutil.Error):
                    process.kill()
            time.sleep(0.05)
        shutil.rmtree(self.folder, ignore_errors=True)


def leave_out(ray_params: object, head: bool) -> None:
    """Called by `ray start` (RAY_START_HOOK): no server for Ray's thin clients, since there are none."""
    ray_params.ray_client_server_port = None  # type: ignore[attr-defined]


def _guard(num_cpus: int, folder: Path) -> subprocess.Popen[bytes]:
    """Not by asyncio, which, cancelled in the middle, ends the shell but not what that has begun."""
    return subprocess.Popen(
        ["/bin/sh", "-c", _GUARD, "nanoflow-ray", *_command(num_cpus, folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={
            "RAY_START_HOOK": f"{__name__}.leave_out",
            # What actors have started ends when their pipes do, and clears up: Ray would kill it before that.
            "RAY_kill_child_processes_on_worker_exit": "false",
            **os.environ,
            "TMPDIR": str(folder),  # whatever its processes leave behind goes with it
        },
        start_new_session=True,
    )


def _command(num_cpus: int, folder: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--port=0", f"--temp-dir={folder}"),
        *("--node-ip-address=127.0.0.1", "--dashboard-agent-listen-port=0", "--include-dashboard=false"),
        *("--no-monitor", "--include-log-monitor=false"),  # no autoscaling of nodes; logs stay in files
        *(f"--num-cpus={num_cpus}", f"--object-store-memory={OBJECT_STORE_BYTES}", "--disable-usage-stats"),
    ]


def _session_of(process: psutil.Process) -> int | None:
    """None when it has ended."""
    try:
        return None if process.status() == psutil.STATUS_ZOMBIE else os.getsid(process.pid)
    except (OSError, psutil.Error):
        return None


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else "it says nothing of the reason"
