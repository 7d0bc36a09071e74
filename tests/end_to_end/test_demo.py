"""`make demo`'s program and the command's first second, interrupted as a terminal and a service manager would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

MODEL = Path(os.environ.get("NANOFLOW_SMOLLM2", ".cache/models/SmolLM2-135M-Instruct"))
DEMO = [sys.executable, "-m", "control_plane.demo", str(MODEL)]
COMMAND = [sys.executable, "-m", "control_plane.entry_point"]


def descendants(mark: str) -> list[psutil.Process]:
    """All processes with this in their environment."""
    found = []
    for each in psutil.process_iter():
        with suppress(psutil.Error):
            if each.status() != psutil.STATUS_ZOMBIE and each.environ().get("DEMO_TEST") == mark:
                found.append(each)
    return found


def cpu_s_of(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def interrupted(
    command: list[str], number: int, begun: Callable[[psutil.Process], bool], after_s: float = 0.0
) -> tuple[int, str]:
    """Exit code and output of a command whose whole process group gets a signal, after_s after it has begun.

    A busy machine starts it late: hence `begun`, and no wall time from the start. Nothing is left of it 3 s later.
    """
    mark = str(uuid.uuid4())
    environ = {**os.environ, "DEMO_TEST": mark}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=environ, start_new_session=True, stdout=pipe, stderr=pipe, text=True)
    while process.poll() is None and not begun(psutil.Process(process.pid)):
        time.sleep(0.002)
    time.sleep(after_s)
    assert process.poll() is None
    os.killpg(process.pid, number)
    signalled_at = time.monotonic()
    try:
        stdout, stderr = process.communicate(timeout=20)
    finally:
        process.kill()
    while descendants(mark) and time.monotonic() - signalled_at < 4:
        time.sleep(0.05)
    assert descendants(mark) == []
    return process.returncode, stdout + stderr


@pytest.mark.ray
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("after_s", [0.5, 4.0, 9.0])
def test_an_interrupted_demo_ends_its_server_and_says_so(number: int, after_s: float) -> None:
    code, output = interrupted(DEMO, number, lambda process: bool(process.children()), after_s)
    assert "Traceback" not in output
    assert code == 128 + number, output


@pytest.mark.ray
def test_the_demo_answers_and_ends_well() -> None:
    ended = subprocess.run([*DEMO, "--max-tokens", "4"], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "4 output tokens" in ended.stdout
    assert "== Shutting down" in ended.stdout


@pytest.mark.ray
def test_a_server_that_cannot_start_ends_the_demo_with_one_line(tmp_path: Path) -> None:
    ended = subprocess.run([*DEMO[:-1], str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "config.json" in ended.stderr
    assert "exit code 2 before it was ready" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("cpu_s", [0.1, 0.2, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.9, 1.2])
@pytest.mark.parametrize("command", ["generate", "serve"])
def test_ctrl_c_in_the_first_second_leaves_no_traceback(command: str, cpu_s: float) -> None:
    flags = ["--prompt", "x", "--max-tokens", "1"] if command == "generate" else ["--port", "0", "--metrics-port", "0"]
    code, output = interrupted(
        [*COMMAND, command, str(MODEL), *flags], signal.SIGINT, lambda process: cpu_s_of(process) >= cpu_s
    )
    assert "Traceback" not in output
    assert "KeyboardInterrupt" not in output
    assert code in (130, -signal.SIGINT)  # a shell says 130 of both; Python picks the second within `exec`
