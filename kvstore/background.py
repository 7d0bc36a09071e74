"""Work that must not hold up who asks for it: a bounded queue and some threads. Knows nothing of the work."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

Job = Callable[[], None]


class Background:
    """Runs jobs in order of submission; jobs of several threads overlap."""

    def __init__(self, name: str, num_threads: int, max_waiting: int) -> None:
        self._jobs: queue.Queue[Job | None] = queue.Queue(max_waiting)
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
        """Do what was submitted, then end; whether that was done in time."""
        for _ in self._threads:
            try:
                self._jobs.put(None, timeout=timeout_s)
            except queue.Full:
                return False
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # a thread that died would end the tier
                log.exception("a background job failed")
            finally:
                self._jobs.task_done()
        self._jobs.task_done()
