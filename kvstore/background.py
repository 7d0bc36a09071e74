"""Work that must not hold up who asks for it: a bounded queue and some threads. Knows nothing of the work."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

Job = Callable[[], None]


class Background:
    """Runs jobs in order of submission; jobs of several threads overlap."""

    def __init__(self, name: str, num_threads: int, max_waiting: int) -> None:
        self._jobs: queue.Queue[Job | None] = queue.Queue(max_waiting)
        self._drop_from = math.inf  # by time.monotonic: jobs that start later are dropped
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True) for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> bool:
        """Queue a job; False, at once, if too many are waiting."""
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            return False
        return True

    @property
    def num_waiting(self) -> int:
        """Jobs that no thread has taken yet."""
        return self._jobs.qsize()

    def finish(self) -> None:
        """Wait until everything that was submitted is done."""
        self._jobs.join()

    def close(self, timeout_s: float) -> bool:
        """Work on for half of timeout_s, drop what still waits then, and end; whether all threads have."""
        deadline = time.monotonic() + timeout_s
        self._drop_from = time.monotonic() + timeout_s / 2
        for _ in self._threads:
            try:
                self._jobs.put(None, timeout=timeout_s)
            except queue.Full:
                return False
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if time.monotonic() < self._drop_from:
                    job()
            except Exception:  # a thread that died would end the tier
                log.exception("a background job failed")
            finally:
                self._jobs.task_done()
        self._jobs.task_done()
