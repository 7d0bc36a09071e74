"""The bound on the end of a process, in processes of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("last_words", "code"),
    [("", 0), ("threading.Thread(target=threading.Event().wait).start()", 1)],
    ids=["ends by itself", "hangs"],
)
def test_a_process_ends_by_itself_or_is_ended(last_words, code):
    program = f"import threading; from control_plane.exit_watchdog import exit_within; exit_within(0.5); {last_words}"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20)
    assert ended.returncode == code
    assert len(ended.stderr.splitlines()) == code
