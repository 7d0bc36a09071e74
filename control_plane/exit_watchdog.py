"""A bound on the time that a process takes to end, whatever still hangs: threads, other processes, libraries.

Knows nothing of what is being ended.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import NoReturn

log = logging.getLogger(__name__)


def exit_within(timeout_s: float) -> None:
    """Let the process end by itself for so long, then end it at once with exit code 1."""
    timer = threading.Timer(timeout_s, _exit, [timeout_s])
    timer.daemon = True  # does not itself keep the process alive
    timer.start()


def exit_at_once(code: int) -> NoReturn:
    """End with this code when all is taken down: threads of Ray and gRPC can abort while the interpreter is."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _exit(timeout_s: float) -> None:
    log.critical("not everything could be taken down within %g s; ending at once", timeout_s)
    os._exit(1)
