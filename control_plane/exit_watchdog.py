"""A bound on the time that a process takes to end, whatever still hangs: threads, other processes, libraries.

Knows nothing of what is being ended.
"""

from __future__ import annotations

import logging
import os
import threading

log = logging.getLogger(__name__)


def exit_within(timeout_s: float) -> None:
    """Let the process end by itself for so long, then end it at once with exit code 1."""
    timer = threading.Timer(timeout_s, _exit, [timeout_s])
    timer.daemon = True  # does not itself keep the process alive
    timer.start()


def _exit(timeout_s: float) -> None:
    log.critical("not everything could be taken down within %g s; ending at once", timeout_s)
    os._exit(1)
