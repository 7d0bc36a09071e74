"""Says what a long step is doing: one line that changes on a terminal, one line for each step in a log."""

from __future__ import annotations

import time

from rich.console import Console


class ProgressLine:
    """Call it with "what" or "what: how far"; `done` takes the line away. Everything goes to stderr."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, markup=False)
        self._status = self._console.status("starting")
        self._step = ""
        self._began = time.monotonic()

    def __call__(self, what: str) -> None:
        if self._console.is_terminal:
            self._status.update(what)
            self._status.start()
            return
        step = what.split(":")[0]
        if step != self._step:
            self._step = step
            self._console.print(f"{time.monotonic() - self._began:6.1f} s  {step}")

    def share(self, what: str, share: float) -> None:
        """As the worker reports: a step and how much of it is done, 0 to 1."""
        self(f"{what}: {share:.0%}")

    def done(self) -> None:
        """No more to say for now."""
        self._status.stop()
